//! Runs the steps of a script.

use std::{rc::Rc, time::Duration};

use anyhow::Context as _;
use http::uri::Authority;
use tokio::task::JoinSet;

use super::{MockService, grpc::GrpcCall, outgoing::HttpCall};
use crate::graph::{
    kubernetes::PORT,
    model::{CERTAIN, GraphProtocol, GraphService, ScriptCommand, ServiceCall, ServiceGraph},
};

/// Timeout of a call.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A command that is ready to run.
pub(super) enum MockCommand {
    Sleep(Duration),
    Call(Box<OutgoingCall>),
}

/// A call with its connections.
pub(super) struct OutgoingCall {
    /// Position of its destination in the counters.
    counter: usize,
    probability: f64,
    size: u64,
    client: CallClient,
}

enum CallClient {
    Http(HttpCall),
    Grpc(Box<GrpcCall>),
}

/// Returns the host and port of a call, such as `stock:8080`.
pub(super) fn host(graph: &ServiceGraph, caller: &GraphService, call: &ServiceCall) -> String {
    if let Some(hostname) = &call.hostname {
        return hostname.clone();
    }
    let callee = graph.service(&call.service).and_then(|callee| callee.namespace.as_deref());
    match callee {
        Some(namespace) if caller.namespace.as_deref() != callee => {
            format!("{}.{namespace}:{PORT}", call.service)
        }
        _ => format!("{}:{PORT}", call.service),
    }
}

/// Returns the hosts that a service calls, each once.
pub(super) fn hosts(graph: &ServiceGraph, service: &GraphService) -> Vec<String> {
    let mut hosts: Vec<String> = service.calls().map(|call| host(graph, service, call)).collect();
    hosts.sort_unstable();
    hosts.dedup();
    hosts
}

/// Prepares the commands of a service.
pub(super) fn compile(graph: &ServiceGraph, service: &GraphService) -> anyhow::Result<Vec<Vec<MockCommand>>> {
    let hosts = hosts(graph, service);
    let prepare = |command: &ScriptCommand| match command {
        ScriptCommand::Sleep(duration) => Ok(MockCommand::Sleep(*duration)),
        ScriptCommand::Call(call) => {
            let host = host(graph, service, call);
            let counter = hosts.binary_search(&host).unwrap_or(0);
            let authority = host.parse::<Authority>().context("a host name is no authority")?;
            let protocol = graph.service(&call.service).map(|callee| callee.protocol);
            let client = match protocol.unwrap_or_default() {
                GraphProtocol::Http => CallClient::Http(HttpCall::new(&authority, call)),
                GraphProtocol::Grpc => CallClient::Grpc(Box::new(GrpcCall::new(&authority, call)?)),
            };
            Ok(MockCommand::Call(Box::new(OutgoingCall {
                counter,
                probability: call.probability,
                size: call.size,
                client,
            })))
        }
    };
    service.script.iter().map(|step| step.iter().map(prepare).collect()).collect()
}

/// Runs the steps in sequence, until one fails. Returns the error as text.
pub(super) async fn run(service: &Rc<MockService>, forwarded: Rc<[u8]>) -> Result<(), String> {
    for (at, step) in service.script.iter().enumerate() {
        if let [command] = &step[..] {
            command.run(service, &forwarded).await?;
            continue;
        }
        let mut commands = JoinSet::new();
        for number in 0..step.len() {
            let (service, forwarded) = (Rc::clone(service), Rc::clone(&forwarded));
            commands.spawn_local(async move {
                let command = &service.script[at][number];
                command.run(&service, &forwarded).await
            });
        }
        let mut errors = String::new();
        while let Some(result) = commands.join_next().await {
            if let Err(error) = result.unwrap_or_else(|panic| Err(format!("{panic}\n"))) {
                errors.push_str(&error);
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
    }
    Ok(())
}

impl MockCommand {
    async fn run(&self, service: &MockService, forwarded: &[u8]) -> Result<(), String> {
        match self {
            Self::Sleep(duration) => tokio::time::sleep(*duration).await,
            Self::Call(call) => {
                if service.rng.borrow_mut().f64() * CERTAIN >= call.probability {
                    return Ok(());
                }
                service.counters.called(call.counter, call.size);
                let response = async {
                    match &call.client {
                        CallClient::Http(client) => client.call(forwarded).await,
                        CallClient::Grpc(client) => client.call(forwarded).await,
                    }
                };
                tokio::time::timeout(TIMEOUT, response)
                    .await
                    .unwrap_or_else(|_| Err(format!("a call had no response within {TIMEOUT:?}\n")))?;
            }
        }
        Ok(())
    }
}
