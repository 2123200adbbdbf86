//! The airline example.
