//! `skysail-proxy` as a standalone program.

use clap::Parser as _;

/// Sidecar proxy: carries a workload's inbound and outbound traffic.
#[derive(clap::Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    args: skysail_proxy::Args,
}

fn main() -> anyhow::Result<()> {
    skysail_proxy::run(Cli::parse().args)
}
