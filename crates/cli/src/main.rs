//! `skysail`: the command line.
fn main() {}
