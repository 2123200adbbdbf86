//! The airline as a program of its own, as its image runs it.

use clap::Parser;

/// The airline example: five services and their traffic.
#[derive(Parser)]
#[command(name = "airline", version)]
struct Cli {
    #[command(flatten)]
    args: airline::Args,
}

fn main() -> anyhow::Result<()> {
    airline::run(Cli::parse().args)
}
