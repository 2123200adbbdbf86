//! `skysail bench graph`: graphs of services in the format of isotope, the topology benchmark of Istio.
//!
//! [`format`](mod@format) reads a graph into the [`model`], [`check`](mod@check) refuses what could not run, and
//! [`write`](mod@write) writes it. [`generate`] makes graphs, also of [`demo`] applications, [`kubernetes`] and [`graphviz`] convert them. [`serve`]
//! is the mock service, whose [`behavior`] can change while it runs. [`deployment`] makes a mesh to measure from a graph.

mod behavior;
mod check;
mod demo;
mod deployment;
mod format;
mod generate;
mod graphviz;
mod kubernetes;
mod model;
mod serve;
mod value;
mod write;

use std::path::{Path, PathBuf};

use skysail_core::stdio;

pub(crate) use self::{
    behavior::WorkerBehavior,
    deployment::{CLIENT, GraphDeployment, MeshPolicies},
    kubernetes::CONTROL_PORT,
};
use self::{
    generate::GraphShape,
    kubernetes::KubernetesArgs,
    model::{GraphService, ServiceGraph},
    serve::MockArgs,
};
use crate::layout;

/// Columns of the table of services.
const COLUMNS: [&str; 6] = ["service", "type", "replicas", "errors", "response", "requests"];

/// Selects what is done with a graph.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GraphArgs {
    #[command(subcommand)]
    command: GraphCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum GraphCommand {
    /// Check a graph, and print the requests that each service gets for one request to each entry point.
    Check {
        /// Service graph (YAML).
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Print a graph of a regular shape.
    Generate {
        #[command(subcommand)]
        shape: GraphShape,
    },
    /// Convert a graph to another format.
    Convert {
        #[command(subcommand)]
        format: Conversion,
    },
    /// Run the mock service of one service of a graph: its sleeps, calls, errors and response size.
    ///
    /// It answers every request over HTTP/1.1 and, with prior knowledge, gRPC. `/metrics` has its counters. With
    /// --control, its latency and errors can change, and it can go down and return, while it runs.
    Serve(MockArgs),
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Conversion {
    /// Kubernetes objects of a mesh that runs the graph, for `skysail up` or a cluster.
    Kubernetes(KubernetesArgs),
    /// A drawing in the DOT language of Graphviz.
    Graphviz {
        /// Service graph (YAML).
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Runs a command.
///
/// # Errors
/// The graph cannot be read, or the output cannot be written.
pub(crate) fn run(args: GraphArgs) -> anyhow::Result<()> {
    match args.command {
        GraphCommand::Check { file } => check(&file),
        GraphCommand::Serve(args) => serve::run(&args),
        GraphCommand::Generate { shape } => print(&write::yaml(&generate::graph(&shape)?)),
        GraphCommand::Convert { format: Conversion::Kubernetes(args) } => {
            let (text, warnings) = kubernetes::convert(format::read(&args.file)?, &args)?;
            warnings.iter().for_each(|warning| stdio::print_error(format_args!("warning: {warning}")));
            print(&text)
        }
        GraphCommand::Convert { format: Conversion::Graphviz { file } } => {
            print(&graphviz::convert(&format::read(&file)?))
        }
    }
}

/// Prints a text that ends with a line end.
fn print(text: &str) -> anyhow::Result<()> {
    Ok(stdio::print(text.trim_end_matches('\n'))?)
}

fn check(file: &Path) -> anyhow::Result<()> {
    print(&summary(&format::read(file)?))
}

/// Returns the table of services.
fn summary(graph: &ServiceGraph) -> String {
    let replicas: u64 = graph.services.iter().map(|service| u64::from(service.replicas)).sum();
    let requests = graph.requests();
    let total: f64 = requests.iter().sum();
    let row = |(service, requests): (&GraphService, &f64)| {
        vec![
            service.name.clone(),
            service.protocol.name().to_owned(),
            service.replicas.to_string(),
            format!("{} %", service.error_percent),
            value::write_size(service.response_size),
            number(*requests),
        ]
    };
    let rows: Vec<Vec<String>> = graph.services.iter().zip(&requests).map(row).collect();
    let mut text = layout::tables(1, &COLUMNS.map(str::to_owned), &rows);
    let unreachable: Vec<&str> = graph
        .services
        .iter()
        .zip(&requests)
        .filter(|(_, requests)| **requests == 0.0)
        .map(|(service, _)| service.name.as_str())
        .collect();
    text.push_str(&format!(
        "\n\nservices: {}, replicas: {replicas}, requests for one request to each entry point: {}\n",
        graph.services.len(),
        number(total)
    ));
    if !unreachable.is_empty() {
        text.push_str(&format!("services without a request: {}\n", unreachable.join(", ")));
    }
    text
}

/// Writes a number with at most two decimals.
fn number(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests;
