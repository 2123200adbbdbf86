//! `skysail-proxy` as a program of its own.

use clap::Parser as _;

/// The sidecar: carries a workload's traffic in and out.
#[derive(clap::Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    args: skysail_proxy::Args,
}

fn main() -> anyhow::Result<()> {
    skysail_proxy::run(Cli::parse().args)
}
