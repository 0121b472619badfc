"""What tests leave out of the environments that they pack."""

_LIBRARY = "asyncio pydoc_data idlelib lib2to3 distutils ensurepip unittest tkinter turtledemo xml ctypes sqlite3"
_BINARIES = "_ssl _sqlite3 _curses _ctypes _decimal _hashlib _test _codecs unicodedata pyexpat"
_OURS = "examples simulator policies executors cli observe batch"
LITTLE = (
    *("zmq*", "pyzmq*", "include/*", "*/encodings/[!_aclu]*", "*/encodings/cp*"),
    *(f"*/{name}/*" for name in _LIBRARY.split()),
    *(f"*/lib-dynload/{name}*" for name in _BINARIES.split()),
    *(f"*/ctxflow/{name}/*" for name in _OURS.split()),
)
"""What need not be packed where an interpreter only has to start: most of it, and of the time that it takes."""
