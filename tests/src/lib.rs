//! Whole meshes under test; see `tests/`.
