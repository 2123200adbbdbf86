//! A service graph with its defaults applied, and the calls that follow from it.

use std::{collections::BTreeMap, time::Duration};

/// A service graph.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServiceGraph {
    /// Services in the order of the file, at least one of them an entry point.
    pub(super) services: Vec<GraphService>,
}

/// A service of a graph.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GraphService {
    /// Name: a DNS label, unique within the graph.
    pub(super) name: String,
    /// Namespace; `None` for that of the conversion.
    pub(super) namespace: Option<String>,
    /// Cluster, by which a conversion selects services.
    pub(super) cluster: Option<String>,
    /// Labels of its objects in Kubernetes.
    pub(super) labels: BTreeMap<String, String>,
    pub(super) protocol: GraphProtocol,
    pub(super) replicas: u32,
    /// Requests from outside of the graph arrive here.
    pub(super) is_entry_point: bool,
    /// Responses that are errors, in percent.
    pub(super) error_percent: f64,
    /// Size of the response's body in bytes.
    pub(super) response_size: u64,
    /// Number of authorization policies that match no request of the graph.
    pub(super) policies: u32,
    /// Steps of a request, in sequence. The commands of a step run concurrently.
    pub(super) script: Vec<Vec<ScriptCommand>>,
}

/// Protocol of a service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum GraphProtocol {
    /// HTTP/1.1.
    #[default]
    Http,
    /// gRPC over HTTP/2 with prior knowledge.
    Grpc,
}

impl GraphProtocol {
    /// Returns the value of `type`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// A command of a script.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ScriptCommand {
    Sleep(Duration),
    Call(ServiceCall),
}

/// A call of another service.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ServiceCall {
    pub(super) service: String,
    /// Size of the request's body in bytes.
    pub(super) size: u64,
    /// Host and port; `None` for those of the service.
    pub(super) hostname: Option<String>,
    /// Further headers.
    pub(super) headers: BTreeMap<String, String>,
    /// Probability of the call in percent, above 0.
    pub(super) probability: f64,
}

/// Probability of a call that is always made, in percent.
pub(super) const CERTAIN: f64 = 100.0;

impl ServiceCall {
    /// Returns true if the call is always made.
    pub(super) fn is_certain(&self) -> bool {
        self.probability >= CERTAIN
    }
}

impl GraphService {
    /// Returns the calls of a service in the order of its script.
    pub(super) fn calls(&self) -> impl Iterator<Item = &ServiceCall> {
        self.script.iter().flatten().filter_map(|command| match command {
            ScriptCommand::Call(call) => Some(call),
            ScriptCommand::Sleep(_) => None,
        })
    }
}

impl ServiceGraph {
    /// Returns the service with this name.
    pub(super) fn service(&self, name: &str) -> Option<&GraphService> {
        self.services.iter().find(|service| service.name == name)
    }

    /// Returns the mean number of requests that each service gets for one request to each entry point, in the order of
    /// the services. Errors count as if their script had run.
    pub(super) fn requests(&self) -> Vec<f64> {
        let index = self.index();
        let mut missing = vec![0_u32; self.services.len()];
        let edges: Vec<Vec<(usize, f64)>> = self
            .services
            .iter()
            .map(|service| {
                let edge = |call: &ServiceCall| {
                    Some((*index.get(call.service.as_str())?, call.probability / CERTAIN))
                };
                service.calls().filter_map(edge).collect()
            })
            .collect();
        edges.iter().flatten().for_each(|(callee, _)| missing[*callee] += 1);
        let mut requests: Vec<f64> =
            self.services.iter().map(|service| f64::from(u8::from(service.is_entry_point))).collect();
        // A service is complete once all its callers are.
        let mut complete: Vec<usize> = (0..missing.len()).filter(|at| missing[*at] == 0).collect();
        while let Some(caller) = complete.pop() {
            for &(callee, share) in &edges[caller] {
                requests[callee] += requests[caller] * share;
                missing[callee] -= 1;
                if missing[callee] == 0 {
                    complete.push(callee);
                }
            }
        }
        requests
    }

    /// Returns the position of each service by its name.
    pub(super) fn index(&self) -> BTreeMap<&str, usize> {
        self.services.iter().enumerate().map(|(at, service)| (service.name.as_str(), at)).collect()
    }
}
