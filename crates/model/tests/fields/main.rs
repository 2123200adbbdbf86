//! The table of fields agrees with the types, with validation, and with the tests that it names.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panic")]

mod definitions;
mod findings;
mod kinds;
mod named_tests;
mod protos;
mod trace;
