//! `skysail-proxy` as a program of its own.
fn main() {}
