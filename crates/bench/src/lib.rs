//! `skysail bench`: measures the cost of a mesh on this machine, next to other proxies in the same run.
//!
//! [`control`] measures a control plane, and [`sign`] its certificate authority. [`dns`] counts the DNS
//! queries of a control plane and of Envoys. [`gateway`] measures a gateway with many hosts. [`instructions`]
//! counts the instructions of a request, and [`micro`] compares the times of single functions. [`graph`] reads,
//! generates, converts and serves service graphs.
//!
//! [`latency`] and [`compare`] measure peers, which are the proxies to compare. They run in rounds; in each
//! round every peer has one turn for each setting. [`topology`] runs a turn: a server ([`serve`]), the sidecars
//! ([`peers`], [`variant`]) with their access logs ([`access_log`], [`collect`]), and the load ([`load`]).
//! [`accounting`] reads the kernel's figures of each process. [`report`] writes
//! the result file and its tables. [`scenario`] runs the same turns as a file describes them, and compares and draws
//! their results; it also measures the generation of configuration ([`generation`]) and a whole mesh ([`mesh`]).

// The standard macros panic when the reader closes the output; `skysail_core::stdio` does not.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod compare;
mod control;
mod dns;
mod gateway;
mod instructions;
mod latency;
mod micro;
mod scenario;
mod sign;
// In groups from top to bottom: a group uses the groups below it. Exception: `html` and `results` use `stage`.
mod stage;

mod airline;
mod mesh;

mod graph;

mod html;
mod report;
mod results;
mod token;
mod topology;
mod variant;

mod access_log;
mod collect;
mod generation;
mod load;
mod peers;
mod perf;
mod relay;
mod serve;

mod accounting;
mod callgrind;
mod certificates;
mod child;
mod cpus;
mod document;
mod envoy;
mod flame;
mod foreign_load;
mod layout;
mod namespace;
mod network;
mod node;
mod percentiles;
mod plot;
mod schedule;
mod tls;

use skysail_load::{clock, http1, stream};

/// Selects the benchmark.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Benchmark {
    /// Latency that sidecars add, their CPU time and their memory, at a fixed rate of requests.
    ///
    /// The client sends each request when it is due, whether or not earlier ones were answered; latency counts from
    /// that moment. Every peer gets the same load in turn, round after round.
    Latency(latency::LatencyArgs),
    /// Cost of a sidecar next to other proxies: CPU time, latency, throughput, handshakes, memory.
    ///
    /// A fixed set of experiments, each peer in turn, round after round. Prints tables, writes a result file and
    /// optionally a page with plots.
    Compare(compare::CompareArgs),
    /// Cost of a control plane: memory, CPU time, sidecars configured per second, and the time until a change has
    /// reached all of them.
    ///
    /// One process acts as thousands of sidecars of a control plane that it starts. They connect, subscribe,
    /// acknowledge responses, receive changes, disconnect and reconnect.
    Control(control::ControlArgs),
    /// DNS queries for the names in ServiceEntries: of one control plane for all sidecars, and of each Envoy.
    Dns(dns::DnsArgs),
    /// Cost of a gateway with many hosts, each with a certificate of its own: start, memory, changes.
    ///
    /// The same control plane serves skysail-proxy and an Envoy in turn, round after round.
    Gateway(gateway::GatewayArgs),
    /// Service graphs in the format of isotope: check, generate and convert them.
    Graph(graph::GraphArgs),
    /// Instructions that a sidecar executes per request, counted by valgrind. The load of the machine does not affect
    /// them.
    ///
    /// For CI, --baseline compares the counts with a file that is kept with the source, and fails if they have
    /// increased.
    Instructions(instructions::InstructionsArgs),
    /// Compare times of single functions, measured by `cargo bench`, with a baseline that is kept with the source.
    ///
    /// Exit code 1 if a median is above the baseline by more than the tolerance, or if a benchmark is new or missing. On
    /// another CPU model than that of the baseline, ratios are reported and not judged.
    Micro(micro::MicroArgs),
    /// Run scenarios: topology, load, peers, measurements and acceptance, each in a YAML file.
    ///
    /// Every peer gets the same load in turn, round after round. The results, and the same figures in the columns of
    /// Istio's benchmark.csv, are stored as files.
    Run(scenario::RunArgs),
    /// Draw results of `bench run` as one self-contained HTML page.
    Report(scenario::PageArgs),
    /// Compare two results of `bench run`. Exit code 1 if a figure of skysail is worse.
    Diff(scenario::DiffArgs),
    /// Certificates that the authority signs per second, without the network.
    Sign(sign::SignArgs),
    /// Size of a mesh: vCPU, memory and cost of a month, computed from measured results.
    Size(scenario::SizeArgs),
    /// Answers requests with their own bodies.
    #[command(hide = true)]
    Serve(serve::ServeArgs),
    /// Collects the access log of a sidecar.
    #[command(hide = true)]
    Collect(collect::CollectArgs),
    /// Relays bytes in both directions between clients and a server.
    #[command(hide = true)]
    Relay(relay::RelayArgs),
}

/// Runs a benchmark. Returns true if all of it was measured. The process must have only one thread, because the
/// kernel lets only a single-threaded process create a user namespace.
///
/// # Errors
/// The machine lacks something that the benchmark needs, or the result cannot be written.
pub fn run(args: Args) -> anyhow::Result<bool> {
    match args.benchmark {
        Benchmark::Latency(args) => latency::run(args),
        Benchmark::Compare(args) => compare::run(args),
        Benchmark::Control(args) => control::run(&args),
        Benchmark::Dns(args) => dns::run(&args),
        Benchmark::Gateway(args) => gateway::run(&args),
        Benchmark::Graph(args) => graph::run(args).map(|()| true),
        Benchmark::Instructions(args) => instructions::run(args),
        Benchmark::Micro(args) => micro::run(args),
        Benchmark::Run(args) => scenario::run(&args),
        Benchmark::Report(args) => scenario::page(&args).map(|()| true),
        Benchmark::Diff(args) => scenario::diff(&args),
        Benchmark::Sign(args) => sign::run(&args),
        Benchmark::Size(args) => scenario::size(&args).map(|()| true),
        Benchmark::Serve(args) => serve::run(&args).map(|()| true),
        Benchmark::Collect(args) => collect::run(&args).map(|()| true),
        Benchmark::Relay(args) => relay::run(&args).map(|()| true),
    }
}
