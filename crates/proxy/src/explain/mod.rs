//! Explanation of decisions: which listener, filter chain, route, policies and cluster a request meets, and why.
//!
//! It runs the translation and the decisions of the request path on resources given as bytes, so that the explanation
//! is what a proxy with these resources does. Nothing is sent, and no connection is opened.

mod origins;
mod report;

use std::{net::SocketAddr, rc::Rc, sync::Arc};

use bytes::Bytes;
use skysail_http::{head::RequestHead, map::Map};
use skysail_policy::{
    config::{
        Cluster, Endpoints, FilterChain, HttpManager, Listeners, RouteTable, Snapshot,
        cluster::Discovery,
        http::{FilterKind, Routes},
        listener::{TcpProxy, Terminal, Transport},
        policy::{Policy, RuleAction, Rules},
        route::{Action, Route, Setting, Targets},
    },
    path,
    peer::{Certificate, Peer},
    rbac::{self, Subject, Tally, Verdict},
    route,
};
use skysail_xds::{Kind, envoy::pb::envoy::config::core::v3::Node};

use self::origins::Origins;
pub use self::report::{
    ClusterReport, EndpointReport, Explanation, Outcome, PolicyReport, RouteReport, Target,
};
use crate::{
    translate::{TlsContexts, Translator},
    worker::{filter_chain_match, inspect::Findings},
};

/// A resource as the control plane sends it.
#[derive(Clone, Debug)]
pub struct Resource {
    /// Type.
    pub kind: Kind,
    /// Name.
    pub name: String,
    /// Encoded message.
    pub body: Bytes,
}

/// Properties of a connection.
#[derive(Clone, Debug)]
pub struct Connection<'a> {
    /// Source address.
    pub source: SocketAddr,
    /// Destination address before interception.
    pub destination: SocketAddr,
    /// SPIFFE id of the client's certificate; `None` for plain text.
    pub principal: Option<&'a str>,
    /// ALPN protocols of the client, for TLS.
    pub alpn: &'a [&'a str],
}

/// The configuration of one proxy.
#[derive(Debug, Default)]
pub struct Configuration {
    snapshot: Snapshot,
    origins: Origins,
    /// Resources that a `skysail-proxy` refuses: name and reason.
    refused: Vec<(String, String)>,
}

impl Configuration {
    /// Translates the resources of a proxy.
    pub fn load(resources: &[Resource]) -> Self {
        let (tls, node) = (TlsContexts::default(), Node::default());
        let translator = Translator { tls: &tls, node: &node, strict: false };
        let mut loaded = Self::default();
        let (mut listeners, mut routes) = (Listeners::default(), Map::default());
        let mut clusters: Map<Arc<str>, Arc<Cluster>> = Map::default();
        let of = |kind: Kind| resources.iter().filter(move |resource| resource.kind == kind);
        for Resource { name, body, .. } in of(Kind::Cluster) {
            match translator.cluster(body) {
                Ok(cluster) => _ = clusters.insert(name.as_str().into(), Arc::new(cluster)),
                Err(reject) => loaded.refused.push((name.clone(), reject.to_string())),
            }
            loaded.origins.add_cluster(name, body);
        }
        for Resource { name, body, .. } in of(Kind::Endpoint) {
            let users = clusters.values().filter(
                |cluster| matches!(&cluster.discovery, Discovery::Eds(service) if **service == **name),
            );
            for cluster in users {
                match translator.endpoints(body, cluster) {
                    Ok(endpoints) => cluster.endpoints.store(Arc::new(endpoints)),
                    Err(reject) => loaded.refused.push((name.clone(), reject.to_string())),
                }
            }
        }
        for Resource { name, body, .. } in of(Kind::Route) {
            match translator.routes(body) {
                Ok(table) => _ = routes.insert(Arc::from(name.as_str()), Arc::new(table)),
                Err(reject) => loaded.refused.push((name.clone(), reject.to_string())),
            }
            loaded.origins.add_routes(name, body);
        }
        for Resource { name, body, .. } in of(Kind::Listener) {
            match translator.listener(body) {
                Ok(listener) => {
                    let listener = Arc::new(listener);
                    for address in &listener.addresses {
                        listeners.by_address.insert(*address, Arc::clone(&listener));
                    }
                    listeners.by_name.insert(name.as_str().into(), listener);
                }
                Err(reject) => loaded.refused.push((name.clone(), reject.to_string())),
            }
        }
        loaded.snapshot = Snapshot {
            listeners: Arc::new(listeners),
            routes: Arc::new(routes),
            clusters: Arc::new(clusters),
            distrusted: 0,
        };
        loaded
    }

    /// Returns the resources that a `skysail-proxy` refuses, with the reasons.
    pub fn refused(&self) -> &[(String, String)] {
        &self.refused
    }

    /// Explains a request on a connection that the listener `entry` accepts, such as `virtualOutbound`.
    pub fn explain(&self, entry: &str, connection: &Connection<'_>, head: &RequestHead) -> Explanation {
        let mut explained = Explanation::default();
        let Some(entry) = self.snapshot.listeners.by_name.get(entry) else {
            explained.outcome = Outcome::Refused(format!("there is no listener {entry}"));
            return explained;
        };
        let listener = filter_chain_match::listener(&self.snapshot, entry, connection.destination);
        explained.listener = listener.name.to_string();
        let findings = findings(connection, head);
        let facts = filter_chain_match::Facts {
            destination: connection.destination,
            source: connection.source,
            findings: &findings,
        };
        let Some(chain) = filter_chain_match::select(&listener, &facts) else {
            explained.outcome = Outcome::Refused("no filter chain matches the connection".to_owned());
            return explained;
        };
        explained.filter_chain = chain.name.to_string();
        let peer = peer(connection);
        let subject = Subject {
            head: None,
            peer: &peer,
            source: connection.source,
            remote: connection.source.ip(),
            destination: connection.destination,
            server_name: findings.server_name.as_deref(),
            metadata: None,
        };
        if !check(chain_policies(chain), &subject, &mut explained) {
            explained.outcome = Outcome::Refused("the connection is closed by a policy".to_owned());
            return explained;
        }
        match &chain.terminal {
            Terminal::Tcp(proxy) => self.tcp(proxy, &mut explained),
            Terminal::Http(manager) => self.http(manager, &subject, head, &mut explained),
        }
        explained
    }

    fn tcp(&self, proxy: &TcpProxy, explained: &mut Explanation) {
        explained.protocol = "tcp";
        explained.outcome = Outcome::Forwarded;
        self.add_targets(&proxy.targets, None, explained);
    }

    fn http(
        &self,
        manager: &HttpManager,
        subject: &Subject<'_>,
        head: &RequestHead,
        explained: &mut Explanation,
    ) {
        explained.protocol = "http";
        let mut head = head.copy();
        path::normalize(manager, &mut head);
        let table = match &manager.routes {
            Routes::Inline(table) => Arc::clone(table),
            Routes::Named(name) => match self.snapshot.routes.get(name) {
                Some(table) => Arc::clone(table),
                None => {
                    explained.route_table = name.to_string();
                    explained.outcome = Outcome::Responded(404, "the route table does not exist".to_owned());
                    return;
                }
            },
        };
        explained.route_table = table.name.to_string();
        let route = self.route(&table, &head, explained);
        let subject = Subject { head: Some(&head), ..*subject };
        let allowed = self.filters(manager, route, &subject, explained);
        let Some(route) = route.filter(|_| allowed) else {
            if !allowed {
                explained.outcome = Outcome::Responded(403, "a policy denies the request".to_owned());
            }
            return;
        };
        self.act(route, &head, explained);
    }

    /// Finds the route, and records why the routes before it do not match.
    fn route<'a>(
        &self,
        table: &'a RouteTable,
        head: &RequestHead,
        explained: &mut Explanation,
    ) -> Option<&'a Route> {
        let Some((host, exact)) = route::virtual_host(table, head.authority()) else {
            let reason = format!("no virtual host has the domain {}", head.authority());
            explained.outcome = Outcome::Responded(404, reason);
            return None;
        };
        explained.virtual_host = host.name.to_string();
        explained.is_exact_domain = exact;
        if host.require_tls && !route::is_secure(head) {
            explained.outcome = Outcome::Responded(301, "the virtual host requires TLS".to_owned());
            return None;
        }
        for (index, route) in host.routes.iter().enumerate() {
            let mismatch = route::mismatch(&route.matches, head, None);
            let matched = mismatch.is_none();
            explained.routes.push(RouteReport {
                index,
                name: route.name.to_string(),
                origin: self.origins.route(&table.name, &host.name, index).map(ToOwned::to_owned),
                mismatch,
                share: route.matches.fraction.map(|share| f64::from(share) / 1_000_000.0),
            });
            // A route for a share of requests is followed, and so are the routes after it.
            if matched && route.matches.fraction.is_none() {
                return Some(route);
            }
        }
        explained.outcome =
            Outcome::Responded(404, "no route of the virtual host matches the request".to_owned());
        None
    }

    /// Evaluates the policies among the HTTP filters. Returns whether they admit the request.
    fn filters(
        &self,
        manager: &HttpManager,
        route: Option<&Route>,
        subject: &Subject<'_>,
        explained: &mut Explanation,
    ) -> bool {
        for filter in &manager.filters {
            let setting = route.and_then(|route| route.setting(&filter.name));
            if matches!(setting, Some(Setting::Off)) || (filter.disabled && setting.is_none()) {
                continue;
            }
            match (&filter.kind, setting) {
                (_, Some(Setting::Rbac(policy))) | (FilterKind::Rbac(policy), _) => {
                    if !check(std::slice::from_ref(policy), subject, explained) {
                        return false;
                    }
                }
                (FilterKind::Fault(_) | FilterKind::Cors | FilterKind::RateLimit(_), None) => {}
                _ => explained.filters.push(filter.name.to_string()),
            }
        }
        true
    }

    fn act(&self, route: &Route, head: &RequestHead, explained: &mut Explanation) {
        match &route.action {
            Action::Forward(forward) => {
                explained.outcome = Outcome::Forwarded;
                explained.set_forward(forward);
                self.add_targets(&forward.targets, Some(head), explained);
            }
            Action::Redirect(redirect) => {
                let location = route::location(redirect, head, head.scheme());
                explained.outcome = Outcome::Responded(redirect.status, format!("redirect to {location}"));
            }
            Action::Direct(direct) => {
                explained.outcome = Outcome::Responded(direct.status, "direct response".to_owned());
            }
        }
    }

    fn add_targets(&self, targets: &Targets, head: Option<&RequestHead>, explained: &mut Explanation) {
        let share = |weight: u32, total: u32| f64::from(weight) / f64::from(total.max(1));
        let clusters: Vec<(String, f64)> = match targets {
            Targets::Single(cluster) => vec![(cluster.to_string(), 1.0)],
            Targets::Weighted { total, targets } => targets
                .iter()
                .map(|target| (target.cluster.to_string(), share(target.weight, *total)))
                .collect(),
            Targets::Header(name) => {
                let value = head.and_then(|head| head.header(name)).unwrap_or_default();
                vec![(String::from_utf8_lossy(value).into_owned(), 1.0)]
            }
        };
        for (name, share) in clusters {
            let cluster = self.snapshot.clusters.get(name.as_str());
            let report = cluster.map(|cluster| {
                let endpoints: Arc<Endpoints> = cluster.endpoints.load_full();
                ClusterReport::new(cluster, &endpoints, self.origins.cluster(&name))
            });
            explained.targets.push(Target { cluster: name, share, report });
        }
    }
}

/// Returns what the listener filters find in the first bytes of a connection.
fn findings(connection: &Connection<'_>, head: &RequestHead) -> Findings {
    let mut findings = Findings::default();
    if connection.principal.is_some() {
        findings.transport = Some(Transport::Tls);
        findings.protocols = connection.alpn.iter().map(|protocol| protocol.as_bytes().into()).collect();
    } else {
        findings.transport = Some(Transport::RawBuffer);
        let protocol = if head.version.as_str() == "HTTP/2" { "h2c" } else { "http/1.1" };
        findings.protocols = vec![protocol.as_bytes().into()];
    }
    findings
}

fn peer(connection: &Connection<'_>) -> Peer {
    let Some(principal) = connection.principal else { return Peer::plain() };
    let names = skysail_identity::Peer { uris: vec![principal.to_owned()], ..Default::default() };
    Peer::secured(Some(Rc::new(Certificate::new(&[], names))), None)
}

fn chain_policies(chain: &FilterChain) -> &[Arc<Policy>] {
    &chain.policies
}

/// Evaluates policies in order until the first refusal, and records each verdict.
fn check(policies: &[Arc<Policy>], subject: &Subject<'_>, explained: &mut Explanation) -> bool {
    for policy in policies {
        let verdict = rbac::check(std::slice::from_ref(policy), subject, &mut Tally::default());
        let allowed = verdict == Verdict::Allow;
        let Some(rules) = policy.rules.as_ref().or(policy.shadow.as_ref()) else { continue };
        explained.policies.push(PolicyReport {
            action: match rules.action {
                RuleAction::Allow => "ALLOW",
                RuleAction::Deny => "DENY",
                RuleAction::Log => "LOG",
            },
            is_enforced: policy.rules.is_some(),
            allowed,
            matched: rbac::matched(rules, subject).map(ToString::to_string),
            rules: names(rules),
        });
        if !allowed {
            return false;
        }
    }
    true
}

fn names(rules: &Rules) -> Vec<String> {
    rules.rules.iter().map(|rule| rule.name.to_string()).collect()
}
