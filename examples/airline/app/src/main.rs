//! The airline as a separate program, for its image.

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
