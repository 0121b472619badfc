"""What a plug-in's author needs for tests."""
