"""Linear and mixed-integer programs on HiGHS: one form, solved within a stated amount of work, so repeatably."""

from __future__ import annotations

import dataclasses
import math

import highspy
import numpy as np
from highspy import _core

from ctxflow.policies.agh.problem import Bools, Floats, Ints

UNLIMITED = math.inf


@dataclasses.dataclass(frozen=True)
class Program:
    """minimise cost @ v subject to matrix @ v <= limit, lower <= v <= upper, v[integral] whole.

    The matrix has R rows and N columns; its entries are (rows, columns, values), each place at most once.

    :ivar cost, lower, upper, integral: (N,). :ivar limit: (R,).
    """

    cost: Floats
    rows: Ints
    columns: Ints
    values: Floats
    limit: Floats
    lower: Floats
    upper: Floats
    integral: Bools


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much work a solver may do, and how near the best is near enough.

    :ivar seconds: on the clock. :ivar nodes: of the branch and bound, which a busy machine does not change.
    :ivar gap: the share of the cost by which an answer may be above the bound and still count as the best.
    :ivar under: only answers that cost less are looked for.
    """

    seconds: float = UNLIMITED
    nodes: int | None = None
    gap: float = 1e-4
    under: float = UNLIMITED


@dataclasses.dataclass(frozen=True)
class Solved:
    """What the solver found.

    :ivar values: (N,) its best answer, None if it has none. :ivar cost: of that answer.
    :ivar duals: (R,) of a linear program's rows, 0 or less.
    :ivar bound: the least cost of any answer, as far as proven. :ivar closed: whether the answer was proven the best.
    :ivar infeasible: whether it was proven that there is none.
    """

    values: Floats | None
    cost: float
    duals: Floats
    bound: float
    closed: bool
    infeasible: bool


class Solver:
    """HiGHS, made once and used for many programs; on one core, which others need too."""

    def __init__(self, presolve: bool) -> None:
        self._highs = _core._Highs()  # highspy.Highs of 1.16 prints a line when it is made.
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        self._highs.setOptionValue("presolve", "choose" if presolve else "off")

    def solve(self, program: Program, effort: Effort | None = None, start: Floats | None = None) -> Solved:
        """Return the cheapest answer, or the best found with this effort.

        :param start: (N,) an answer to start from; one that is none does no harm.

        >>> program = Program(
        ...     cost=np.array([-1.0, -1.0]), rows=np.array([0, 0]), columns=np.array([0, 1]),
        ...     values=np.array([2.0, 1.0]), limit=np.array([2.5]), lower=np.zeros(2), upper=np.ones(2),
        ...     integral=np.array([True, False]),
        ... )
        >>> Solver(presolve=True).solve(program).values.tolist()
        [1.0, 0.5]
        """
        effort, highs = effort or Effort(), self._highs
        highs.clearModel()
        whole = bool(program.integral.any())
        highs.setOptionValue("time_limit", max(effort.seconds, 1e-3))
        highs.setOptionValue("mip_rel_gap", effort.gap)
        highs.setOptionValue("mip_max_nodes", highspy.kHighsIInf if effort.nodes is None else effort.nodes)
        highs.setOptionValue("objective_bound", effort.under if whole else UNLIMITED)
        highs.passModel(_model(program, whole))
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = start.tolist()
            highs.setSolution(solution)
        highs.run()
        return self._outcome(program, whole)

    def _outcome(self, program: Program, whole: bool) -> Solved:
        highs, status, info = self._highs, self._highs.getModelStatus(), self._highs.getInfo()
        solution = highs.getSolution()
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        closed = status == highspy.HighsModelStatus.kOptimal
        cost = info.objective_function_value if found else UNLIMITED
        return Solved(
            values=np.array(solution.col_value) if found else None,
            cost=cost,
            duals=np.array(solution.row_dual) if solution.dual_valid else np.zeros(len(program.limit)),
            bound=info.mip_dual_bound if whole else cost if closed else -UNLIMITED,
            closed=closed,
            infeasible=status == highspy.HighsModelStatus.kInfeasible,
        )


def _model(program: Program, whole: bool) -> highspy.HighsLp:
    order = np.lexsort((program.rows, program.columns))
    size, count = len(program.cost), len(program.limit)
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = size, count
    model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
    model.row_lower_, model.row_upper_ = np.full(count, -np.inf), program.limit
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(program.columns, minlength=size))])
    model.a_matrix_.index_, model.a_matrix_.value_ = program.rows[order], program.values[order]
    if whole:
        kinds = highspy.HighsVarType
        model.integrality_ = [kinds.kInteger if each else kinds.kContinuous for each in program.integral]
    return model
