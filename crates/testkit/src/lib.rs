//! Parts for tests
