//! `skysaild` as a program of its own.
fn main() {}
