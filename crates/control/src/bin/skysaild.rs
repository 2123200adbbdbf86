//! `skysaild` as a program of its own.

use clap::Parser;

/// The control plane of the Skysail service mesh.
#[derive(Parser)]
#[command(version)]
struct Command {
    #[command(flatten)]
    args: skysail_control::Args,
}

fn main() -> anyhow::Result<()> {
    skysail_control::run(Command::parse().args)
}
