//! The report. Its JSON form is documented in `docs/explain.md`; fields are added and never renamed.

use serde::Serialize;
use serde_json::Value;
use skysail_http::head::RequestHead;
use skysail_proxy::explain::{ChainReport, EndpointReport, LimitReport, RetryReport};

use super::{
    ends::{JourneyEnd, State},
    request::ShownRequest,
};

/// Explanation of a request.
#[derive(Debug, Serialize)]
pub(super) struct ExplainReport {
    /// Client.
    pub(super) from: Party,
    pub(super) request: ShownRequest,
    /// Errors of the configuration: an object with an error may have no effect.
    pub(super) errors: Vec<String>,
    /// Name lookup of the client; `None` for an address.
    pub(super) dns: Option<Dns>,
    /// Client's sidecar; `None` if it does not take the connection.
    pub(super) client: Option<Hop>,
    /// Remarks, such as why the client's sidecar does not take the connection.
    pub(super) notes: Vec<String>,
    /// Places that the request may reach.
    pub(super) destinations: Vec<Destination>,
    /// All requests of this kind are served.
    pub(super) served: bool,
    pub(super) state: State,
    /// Status of the response if a proxy or the fault of the configuration decides it; `None` if the program does.
    pub(super) status: Option<u16>,
    /// Result as a sentence.
    pub(super) result: String,
}

/// Client or server.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Party {
    /// Workload as `NAMESPACE/NAME`; `outside` for a client outside the mesh.
    pub(super) workload: String,
    /// Pod; empty outside the mesh.
    pub(super) pod: String,
    /// Address.
    pub(super) address: String,
    /// SPIFFE ID; `None` without a proxy.
    pub(super) principal: Option<String>,
    pub(super) source: Option<Source>,
}

/// Object, file and line that caused a decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Source {
    /// Kind, namespace and name, as `VirtualService shop/web`.
    pub(super) object: String,
    /// Path of the field; empty for the whole object.
    pub(super) field: String,
    /// File; empty if unknown.
    pub(super) file: String,
    /// Line; 0 if unknown.
    pub(super) line: u32,
}

/// Result of a name lookup.
#[derive(Debug, Serialize)]
pub(super) struct Dns {
    pub(super) host: String,
    /// Full name; empty if the mesh does not know it.
    pub(super) name: String,
    pub(super) addresses: Vec<String>,
    /// Remark; empty for none.
    pub(super) note: String,
}

/// Decisions of one proxy.
#[derive(Debug, Serialize)]
pub(super) struct Hop {
    /// Workload of the proxy.
    pub(super) proxy: String,
    /// `outbound`, `inbound` or `gateway`.
    pub(super) direction: &'static str,
    /// Connection as the proxy sees it: `plain text`, `TLS`, or `mutual TLS`.
    pub(super) transport: String,
    /// Identity of the client; `None` without mutual TLS.
    pub(super) principal: Option<String>,
    /// SNI of a client that sends TLS itself; empty for none.
    pub(super) server_name: String,
    /// Client certificate that the mesh does not issue; `None` without one.
    pub(super) certificate: Option<CertificateStep>,
    /// Mode of mutual TLS that inbound listeners have; empty elsewhere.
    pub(super) mtls_mode: &'static str,
    pub(super) mtls_source: Option<Source>,
    pub(super) listener: Item,
    /// Servers of the Gateways that select the proxy; empty for sidecars.
    pub(super) servers: Vec<ServerStep>,
    pub(super) filter_chain: Item,
    /// Server names that the filter chain matches; empty for all connections.
    pub(super) server_names: Vec<String>,
    /// Other filter chains for the port, with the reasons why they do not match.
    pub(super) unmatched_chains: Vec<ChainReport>,
    /// `http`, `tcp`, or empty if the connection is closed before.
    pub(super) protocol: &'static str,
    pub(super) route_table: String,
    pub(super) virtual_host: String,
    /// Matches of VirtualServices for the host that are for other clients, so that no route or filter chain has them.
    pub(super) excluded_matches: Vec<ExcludedStep>,
    pub(super) routes: Vec<RouteStep>,
    pub(super) filters: Vec<FilterStep>,
    pub(super) targets: Vec<TargetStep>,
    /// Timeout in seconds; `None` disables it.
    pub(super) timeout: Option<f64>,
    pub(super) timeout_source: Option<Source>,
    /// Idle timeout in seconds; `None` disables it.
    pub(super) idle_timeout: Option<f64>,
    pub(super) retry: Option<RetryReport>,
    pub(super) retry_source: Option<Source>,
    pub(super) mirrors: Vec<String>,
    pub(super) outcome: Outcome,
    /// Clusters and virtual hosts of the explanation that the proxy does not hold yet. It requests them when a request
    /// needs them.
    pub(super) on_demand: Vec<String>,
    /// Resources that a `skysail-proxy` refuses: name and reason.
    pub(super) refused_resources: Vec<(String, String)>,
}

/// A client certificate and the verdict of a proxy about it.
#[derive(Debug, Serialize)]
pub(super) struct CertificateStep {
    /// First URI name, DNS name or subject; empty if it is not known.
    pub(super) name: String,
    /// `valid`, `assumed` (taken as valid), `refused`, `ignored` (not valid, but the client is accepted) or `not
    /// requested`.
    pub(super) verdict: &'static str,
    /// Reason why it is refused or ignored; for `assumed` the secret whose CA certificates are not known here.
    pub(super) reason: String,
}

/// A named resource and the object that caused it.
#[derive(Debug, Default, Serialize)]
pub(super) struct Item {
    pub(super) name: String,
    pub(super) source: Option<Source>,
}

/// A server of a Gateway.
#[derive(Debug, Serialize)]
pub(super) struct ServerStep {
    /// Protocol, port, mode of TLS and hosts.
    pub(super) name: String,
    pub(super) taken: bool,
    /// Property that the connection does not have; empty if it is taken.
    pub(super) mismatch: String,
    pub(super) source: Option<Source>,
}

/// A match of a VirtualService for other clients.
#[derive(Debug, Serialize)]
pub(super) struct ExcludedStep {
    /// Property of the client and the expected one.
    pub(super) mismatch: String,
    pub(super) source: Source,
}

/// A route.
#[derive(Debug, Serialize)]
pub(super) struct RouteStep {
    pub(super) index: usize,
    pub(super) name: String,
    pub(super) taken: bool,
    /// Criterion that the request does not meet; empty if it is taken.
    pub(super) mismatch: String,
    /// Share of the matching requests that take it, from 0 to 1; `None` for all.
    pub(super) share: Option<f64>,
    pub(super) source: Option<Source>,
}

/// A filter.
#[derive(Debug, Serialize)]
pub(super) struct FilterStep {
    pub(super) name: String,
    /// Effect of a filter that is no policy.
    pub(super) effect: String,
    /// `ALLOW`, `DENY`, `LOG`, or empty.
    pub(super) action: &'static str,
    /// False for a dry run.
    pub(super) enforced: bool,
    pub(super) allowed: bool,
    /// Rule that matches the request; empty for none.
    pub(super) matched: String,
    /// Objects: that of the matching rule, or all of the filter.
    pub(super) sources: Vec<Source>,
    /// Rules before the one that matches, or all.
    pub(super) unmatched: Vec<UnmatchedRule>,
    /// Tokens of the request, with the verdicts of RequestAuthentications.
    pub(super) tokens: Vec<TokenStep>,
    /// Rate limit.
    pub(super) limit: Option<LimitReport>,
    /// Cluster of the external authorizer that decides about the request; empty for none.
    pub(super) asks: String,
}

/// A token and the verdict of a rule about it.
#[derive(Debug, Serialize)]
pub(super) struct TokenStep {
    /// Place of the token in the request.
    pub(super) place: String,
    /// Principal of the token, `ISSUER/SUBJECT`.
    pub(super) principal: String,
    /// Reason for the refusal; empty if the rule accepts the token.
    pub(super) refused: String,
    /// Server of the keys, if they are not known here and the signature is taken as valid; empty otherwise.
    pub(super) unknown_keys: String,
    /// URL or issuer from which the control plane fetches the keys; empty for keys in the rule.
    pub(super) keys_from: String,
    /// Further claims, verified or not.
    pub(super) claims: Vec<(String, Value)>,
    pub(super) source: Option<Source>,
}

/// A rule of a policy that does not match.
#[derive(Debug, Serialize)]
pub(super) struct UnmatchedRule {
    pub(super) rule: String,
    /// Conditions that the request does not meet.
    pub(super) mismatch: String,
    pub(super) source: Option<Source>,
}

/// A cluster that the proxy may select.
#[derive(Debug, Serialize)]
pub(super) struct TargetStep {
    pub(super) cluster: String,
    /// Share of the requests to the proxy, from 0 to 1.
    pub(super) share: f64,
    pub(super) subset: String,
    /// DestinationRule, with the field of the subset.
    pub(super) source: Option<Source>,
    pub(super) services: Vec<Source>,
    pub(super) balancer: String,
    /// Connect timeout in seconds.
    pub(super) connect_timeout: f64,
    pub(super) endpoints: Vec<EndpointReport>,
    /// `known` or `unknown`: which endpoints outlier detection has ejected; empty if the cluster ejects none.
    pub(super) ejections: &'static str,
    pub(super) resolves: Vec<String>,
    /// Reason why requests to the cluster fail; empty for none.
    pub(super) failure: String,
    pub(super) rewritten_path: Option<String>,
    pub(super) rewritten_host: Option<String>,
    pub(super) header_changes: Vec<String>,
}

/// Result at one proxy.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    /// `forwarded`, `responded` or `closed`.
    pub(super) kind: &'static str,
    /// Status of the response; `None` if there is none.
    pub(super) status: Option<u16>,
    /// Reason; empty if it is forwarded.
    pub(super) reason: String,
}

/// A place that the request may reach.
#[derive(Debug, Serialize)]
pub(super) struct Destination {
    pub(super) cluster: String,
    /// Share of all requests of the client, from 0 to 1.
    pub(super) share: f64,
    pub(super) endpoint: String,
    /// Number of endpoints of the cluster that are equal to this one.
    pub(super) endpoints: usize,
    /// Workload; `None` outside the mesh.
    pub(super) to: Option<Party>,
    /// Proxy of the workload; `None` if it takes no part.
    pub(super) hop: Option<Hop>,
    /// Places that the request may reach from there, at a gateway.
    pub(super) next: Vec<Destination>,
    /// Path that the program receives; empty for connections.
    pub(super) path: String,
    /// Authority that the program receives; empty for connections.
    pub(super) authority: String,
    pub(super) served: bool,
    pub(super) state: State,
    pub(super) status: Option<u16>,
    /// Result as a sentence.
    pub(super) result: String,
}

impl Destination {
    /// Returns a place that one of several equal endpoints is, and that receives a request with this head.
    pub(super) fn new(
        cluster: &str,
        share: f64,
        (endpoint, endpoints): (String, usize),
        head: Option<&RequestHead>,
        JourneyEnd { state, status, result }: JourneyEnd,
    ) -> Self {
        Self {
            cluster: cluster.to_owned(),
            share,
            endpoint,
            endpoints,
            to: None,
            hop: None,
            next: Vec::new(),
            path: head.map(|head| head.path().to_owned()).unwrap_or_default(),
            authority: head.map(|head| head.authority().to_owned()).unwrap_or_default(),
            served: state == State::Served,
            state,
            status,
            result,
        }
    }

    /// Replaces the end.
    pub(super) fn end(&mut self, JourneyEnd { state, status, result }: JourneyEnd) {
        (self.served, self.state, self.status, self.result) = (state == State::Served, state, status, result);
    }
}
