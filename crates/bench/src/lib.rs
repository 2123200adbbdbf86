//! `skysail bench`: what a mesh costs on this machine, beside other proxies in the same run.
//!
//! [`latency`] is the plan: rounds in which every peer takes its turn. One turn is [`topology`]: an echo server
//! ([`serve`]), the sidecars ([`peers`]), the load ([`load`]) and what the kernel says about each process
//! ([`accounting`]). [`report`] makes the result file and the table of it.

// They panic when the reader leaves; `skysail_core::stdio` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod report;
// Those below are used by those above.
mod accounting;
mod certificates;
mod child;
mod clock;
mod envoy;
mod http1;
mod latency;
mod load;
mod namespace;
mod peers;
mod schedule;
mod serve;
mod topology;

/// What to measure.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Benchmark {
    /// Latency that sidecars add, their CPU and their memory, at a fixed rate of requests.
    ///
    /// A client sends requests when they are due, whether or not earlier ones were answered, and latency counts
    /// from that moment. Every peer gets the same load in turn, round after round.
    Latency(latency::Args),
    /// Answer requests with their own bodies.
    #[command(hide = true)]
    Serve(serve::Args),
}

/// Runs a benchmark, and says whether all of it was measured. The process must have one thread only, as the kernel
/// wants for namespaces.
///
/// # Errors
/// When something it needs is missing, or the result cannot be written.
pub fn run(args: Args) -> anyhow::Result<bool> {
    match args.benchmark {
        Benchmark::Latency(args) => latency::run(args),
        Benchmark::Serve(args) => serve::run(&args).map(|()| true),
    }
}
