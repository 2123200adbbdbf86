//! Generates graphs of regular shapes: trees, stars and meshes, and copies of a demo application.

use std::{collections::BTreeMap, time::Duration};

use anyhow::ensure;

use super::{
    demo::{self, DemoServices},
    format::MAX_SERVICES,
    model::{GraphProtocol, GraphService, ScriptCommand, ServiceCall, ServiceGraph},
    value,
};

/// Shape of a graph.
#[derive(Clone, Debug, clap::Subcommand)]
pub(super) enum GraphShape {
    /// A tree: each service calls its branches concurrently. One branch gives a chain.
    Tree {
        #[command(flatten)]
        levels: Levels,
        #[command(flatten)]
        settings: ServiceSettings,
    },
    /// A star: the entry point calls all other services concurrently.
    Star {
        /// Number of services, with the entry point.
        #[arg(long, value_name = "N", default_value_t = 10)]
        services: u32,
        #[command(flatten)]
        settings: ServiceSettings,
    },
    /// A mesh of levels: each service calls all services of the next level concurrently. The number of requests grows
    /// with each level by the factor of the branches.
    Mesh {
        #[command(flatten)]
        levels: Levels,
        #[command(flatten)]
        settings: ServiceSettings,
    },
    /// Copies of a demo application of ten services: emojivoto and bookinfo. A request to the entry point reaches one copy
    /// on average, at random. `--probability` has no effect.
    Demo {
        /// Number of copies.
        #[arg(long, value_name = "N", default_value_t = 1)]
        copies: u32,
        #[command(flatten)]
        settings: ServiceSettings,
    },
}

/// Levels below the entry point, and their width.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct Levels {
    /// Number of levels, with that of the entry point.
    #[arg(long, value_name = "N", default_value_t = 3)]
    levels: u32,

    /// Number of services that each service calls.
    #[arg(long, value_name = "N", default_value_t = 3)]
    branches: u32,
}

/// Settings of every service.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(super) struct ServiceSettings {
    /// Protocol.
    #[arg(long, value_name = "TYPE", value_enum, default_value_t = GraphProtocol::Http)]
    r#type: GraphProtocol,

    /// Number of replicas.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    replicas: u32,

    /// Size of request bodies, such as 1KB.
    #[arg(long, value_name = "SIZE", default_value = "128", value_parser = value::size)]
    request_size: u64,

    /// Size of response bodies.
    #[arg(long, value_name = "SIZE", default_value = "128", value_parser = value::size)]
    response_size: u64,

    /// Responses that are errors.
    #[arg(long, value_name = "PERCENT", default_value = "0%", value_parser = value::percentage)]
    error_rate: f64,

    /// Probability of each call, in percent.
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    probability: u32,

    /// Processing time before the calls, such as 10ms.
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = value::sleep)]
    sleep: Duration,
}

/// Returns a graph.
///
/// # Errors
/// The graph would have no service or too many.
pub(super) fn graph(shape: &GraphShape) -> anyhow::Result<ServiceGraph> {
    // By service: its name and the indexes of the services that it calls.
    let (services, settings) = match shape {
        GraphShape::Tree { levels, settings } => (tree(*levels)?, settings),
        GraphShape::Star { services, settings } => {
            ensure!(*services > 0, "--services must be at least 1");
            (tree(Levels { levels: 2, branches: services - 1 })?, settings)
        }
        GraphShape::Mesh { levels, settings } => (mesh(*levels)?, settings),
        GraphShape::Demo { copies, settings } => {
            return Ok(service_graph(demo::services(*copies)?, settings));
        }
    };
    let names: Vec<String> = services.iter().map(|(name, _)| name.clone()).collect();
    let callees = |callees: Vec<usize>| {
        callees.into_iter().map(|callee| (names[callee].clone(), f64::from(settings.probability))).collect()
    };
    let services = services.into_iter().map(|(name, of)| (name, callees(of))).collect();
    Ok(service_graph(services, settings))
}

/// Returns the graph of services, each with its callees and their probability in percent. The first one is the entry point.
fn service_graph(services: DemoServices, settings: &ServiceSettings) -> ServiceGraph {
    let service = |(at, (name, callees)): (usize, (String, Vec<(String, f64)>))| GraphService {
        name,
        namespace: None,
        cluster: None,
        labels: BTreeMap::new(),
        protocol: settings.r#type,
        replicas: settings.replicas,
        is_entry_point: at == 0,
        error_percent: settings.error_rate,
        response_size: settings.response_size,
        policies: 0,
        script: script(callees, settings),
    };
    ServiceGraph { services: services.into_iter().enumerate().map(service).collect() }
}

fn script(callees: Vec<(String, f64)>, settings: &ServiceSettings) -> Vec<Vec<ScriptCommand>> {
    let call = |(service, probability): (String, f64)| {
        ScriptCommand::Call(ServiceCall {
            service,
            size: settings.request_size,
            hostname: None,
            headers: BTreeMap::new(),
            probability,
        })
    };
    let sleep = (!settings.sleep.is_zero()).then(|| vec![ScriptCommand::Sleep(settings.sleep)]);
    let calls: Vec<ScriptCommand> = callees.into_iter().map(call).collect();
    sleep.into_iter().chain((!calls.is_empty()).then_some(calls)).collect()
}

/// Names and callees of services.
type Named = Vec<(String, Vec<usize>)>;

/// Returns the services of a tree by level.
fn tree(levels: Levels) -> anyhow::Result<Named> {
    let mut services: Named = vec![("svc-0".to_owned(), Vec::new())];
    let mut level = 0..1;
    for _ in 1..checked(levels)? {
        let first = services.len();
        for parent in level {
            for branch in 0..levels.branches {
                ensure_number(services.len() + 1)?;
                let name = format!("{}-{branch}", services[parent].0);
                let child = services.len();
                services[parent].1.push(child);
                services.push((name, Vec::new()));
            }
        }
        level = first..services.len();
    }
    // A name is a DNS label.
    let longest = services.last().map_or(0, |(name, _)| name.len());
    ensure!(longest <= 63, "names would have {longest} of at most 63 characters; reduce --levels");
    Ok(services)
}

/// Returns the services of a mesh by level.
fn mesh(levels: Levels) -> anyhow::Result<Named> {
    let mut services: Named = vec![("svc-0".to_owned(), Vec::new())];
    let mut level = 0..1;
    for number in 1..checked(levels)? {
        let first = services.len();
        for branch in 0..levels.branches {
            ensure_number(services.len() + 1)?;
            services.push((format!("svc-{number}-{branch}"), Vec::new()));
        }
        let next = first..services.len();
        services[level].iter_mut().for_each(|(_, callees)| callees.extend(next.clone()));
        level = next;
    }
    Ok(services)
}

/// Returns the number of levels.
fn checked(levels: Levels) -> anyhow::Result<u32> {
    ensure!(levels.levels > 0, "--levels must be at least 1");
    ensure_number(levels.levels as usize)?;
    Ok(levels.levels)
}

fn ensure_number(services: usize) -> anyhow::Result<()> {
    ensure!(
        services <= MAX_SERVICES,
        "the graph would have more than {MAX_SERVICES} services; reduce --levels, --branches or --services"
    );
    Ok(())
}
