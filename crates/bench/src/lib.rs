//! `skysail bench`: what a mesh costs on this machine, beside other proxies in the same run.
//!
//! [`control`] drives a control plane, [`sign`] its authority, [`dns`] counts what it asks of DNS; [`latency`] and [`compare`] are plans: rounds in which every peer takes its turn. One turn is [`topology`]: a server
//! ([`serve`]), the sidecars ([`peers`]), the load ([`load`]) and what the kernel says about each process
//! ([`accounting`]). [`report`] makes the result file and the tables of it.

// They panic when the reader leaves; `skysail_core::stdio` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod compare;
mod control;
mod dns;
mod instructions;
mod latency;
mod sign;
// Those below are used by those above.
mod stage;

mod report;
mod results;
mod topology;

mod load;
mod peers;
mod relay;
mod serve;

mod accounting;
mod busy;
mod callgrind;
mod certificates;
mod child;
mod clock;
mod cpus;
mod envoy;
mod http1;
mod layout;
mod namespace;
mod node;
mod schedule;
mod stream;

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
    /// All that a sidecar costs, beside other proxies: CPU, latency, throughput, handshakes, memory.
    ///
    /// A fixed set of experiments, every peer in turn, round after round; tables, a result file and, if wanted, a page
    /// with plots.
    Compare(compare::Args),
    /// What a control plane costs: memory, CPU, sidecars configured a second, and how soon a change is at all of them.
    ///
    /// One process acts as thousands of sidecars towards a control plane that it starts: they connect, take what they
    /// subscribe to and acknowledge it, are told of changes, go and come back.
    Control(control::Args),
    /// How often DNS servers are asked for the names in ServiceEntries: by one control plane for all, and by each Envoy.
    Dns(dns::Args),
    /// Instructions that a sidecar executes for a request, counted by valgrind: the same whatever else the machine does.
    ///
    /// For CI: a change that makes requests dearer fails against a file that is kept beside the source.
    Instructions(instructions::Args),
    /// Certificates that an authority signs a second, aside from the network.
    Sign(sign::Args),
    /// Answer requests with their own bodies.
    #[command(hide = true)]
    Serve(serve::Args),
    /// Move bytes both ways between clients and a server.
    #[command(hide = true)]
    Relay(relay::Args),
}

/// Runs a benchmark, and says whether all of it was measured. The process must have one thread only, as the kernel
/// wants for namespaces.
///
/// # Errors
/// When something it needs is missing, or the result cannot be written.
pub fn run(args: Args) -> anyhow::Result<bool> {
    match args.benchmark {
        Benchmark::Latency(args) => latency::run(args),
        Benchmark::Compare(args) => compare::run(args),
        Benchmark::Control(args) => control::run(&args),
        Benchmark::Dns(args) => dns::run(&args),
        Benchmark::Instructions(args) => instructions::run(args),
        Benchmark::Sign(args) => sign::run(&args),
        Benchmark::Serve(args) => serve::run(&args).map(|()| true),
        Benchmark::Relay(args) => relay::run(&args).map(|()| true),
    }
}
