//! Explanation of decisions: which listener, filter chain, route, policies and cluster a request meets, and why.
//!
//! It runs the translation and the request path's decisions on encoded resources. The explanation is therefore what a
//! proxy with these resources does. Nothing is sent, and no connection is opened.

mod arrival;
mod authorizers;
mod certificate;
mod chains;
mod dump;
mod filters;
mod limits;
mod listeners;
mod origins;
mod report;
mod shares;
mod target;
mod tokens;

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use serde_json::{Map, Value};
use skysail_http::head::RequestHead;
use skysail_http::map::Map as FastMap;
use skysail_policy::{
    config::{
        Cluster, FilterChain, HttpManager, Listener, Listeners, RouteTable, Snapshot,
        cluster::Discovery,
        http::Routes,
        listener::{TcpProxy, Terminal},
        route::{Action, Forward, RedirectPath, Route, Target as Weighted, Targets, VirtualHost},
    },
    headers::{self, Hop},
    rbac::Subject,
    route::{self, Found, NoRoute},
};
use skysail_proto::Codec as _;
use skysail_xds::{
    Kind,
    envoy::pb::envoy::{
        config::core::v3::{DataSource, Node, data_source::Specifier},
        extensions::transport_sockets::tls::v3::{Secret, secret},
    },
};

pub use self::certificate::CallerCertificate;
pub use self::dump::HeldResources;
pub use self::report::{
    BucketReport, CertificateVerdict, ChainReport, ClusterReport, EndpointReport, Explanation, FilterReport,
    LimitReport, Outcome, PolicyReport, RetryReport, RouteReport, Target, TlsReport, TokenReport,
};
use self::{filters::Passage, origins::Origins, target::EndpointProtocol};
use crate::{
    request::{hop, routing::rewrite_path},
    translate::{self, Reject, TlsContexts, Translator},
    worker::filter_chain_match,
};

/// 100 % in millionths.
const ALL: u32 = 1_000_000;
/// Maximum number of domains in a reason.
const MAX_DOMAINS: usize = 6;
/// Status of a response if there is no route.
const NOT_FOUND: u16 = 404;
/// Status of a response if a cluster has no healthy endpoint.
const UNAVAILABLE: u16 = 503;

/// A resource as the control plane sends it.
#[derive(Clone, Debug)]
pub struct EncodedResource {
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
    /// TLS of the client; `None` for plain text.
    pub tls: Option<ClientHello<'a>>,
}

/// TLS of a client: the fields of its ClientHello, and its certificate.
#[derive(Clone, Copy, Debug)]
pub struct ClientHello<'a> {
    /// SNI; empty for none.
    pub server_name: &'a str,
    /// ALPN protocols.
    pub alpn: &'a [String],
    /// Certificate of the client, which it presents if the server requests one.
    pub certificate: Option<&'a CallerCertificate>,
}

/// The configuration of one proxy.
#[derive(Debug, Default)]
pub struct ProxyConfiguration {
    snapshot: Snapshot,
    origins: Origins,
    /// Resources that a `skysail-proxy` refuses: name and reason.
    refused: Vec<(String, String)>,
    /// Verification of clients, with the trusted roots that are known.
    tls: TlsContexts,
    /// Indices of the JWT providers whose signatures are taken as valid.
    assumed: Vec<usize>,
    /// The ejections of endpoints are known.
    knows_ejections: bool,
}

impl ProxyConfiguration {
    /// Translates the resources of a proxy.
    pub fn load(resources: &[EncodedResource]) -> Self {
        let (tls, node) = (TlsContexts::default(), Node::default());
        let translator = Translator { tls: &tls, node: &node, strict: false };
        let mut loaded = Self::default();
        let (mut listeners, mut routes) = (Listeners::default(), FastMap::default());
        let mut clusters: FastMap<Arc<str>, Arc<Cluster>> = FastMap::default();
        let of = |kind: Kind| resources.iter().filter(move |resource| resource.kind == kind);
        for EncodedResource { name, body, .. } in of(Kind::Cluster) {
            match translator.cluster(body) {
                Ok(cluster) => _ = clusters.insert(name.as_str().into(), Arc::new(cluster)),
                Err(reject) => loaded.refused.push((name.clone(), reject.to_string())),
            }
            loaded.origins.add_cluster(name, body);
        }
        for EncodedResource { name, body, .. } in of(Kind::Endpoint) {
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
        for EncodedResource { name, body, .. } in of(Kind::Route) {
            match translator.routes(body) {
                Ok(table) => _ = routes.insert(Arc::from(name.as_str()), Arc::new(table)),
                Err(reject) => loaded.refused.push((name.clone(), reject.to_string())),
            }
            loaded.origins.add_routes(name, body);
        }
        for EncodedResource { name, body, .. } in of(Kind::Listener) {
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
            loaded.origins.add_listener(name, body);
        }
        for EncodedResource { name, body, .. } in of(Kind::Secret) {
            if let Err(reject) = trust(&tls, name, body) {
                loaded.refused.push((name.clone(), reject.to_string()));
            }
        }
        loaded.tls = tls;
        loaded.snapshot = Snapshot {
            listeners: Arc::new(listeners),
            routes: Arc::new(routes),
            clusters: Arc::new(clusters),
            distrusted: 0,
        };
        loaded
    }

    /// Adds resources that a running proxy does not apply: name and reason.
    pub fn add_refused(&mut self, refused: Vec<(String, String)>) {
        self.refused.extend(refused);
    }

    /// Returns the resources that a `skysail-proxy` refuses, with the reasons.
    pub fn refused(&self) -> &[(String, String)] {
        &self.refused
    }

    /// Takes the signatures of tokens of these JWT providers as valid, because their keys are not known here. A rule is
    /// the index of its provider in the filter.
    pub fn assume_signatures(&mut self, rules: Vec<usize>) {
        self.assumed = rules;
    }

    /// Applies the ejections of a running proxy: clusters with addresses of endpoints.
    pub fn apply_ejections(&mut self, ejected: &[(String, SocketAddr)]) {
        self.knows_ejections = true;
        for (cluster, address) in ejected {
            let Some(cluster) = self.snapshot.clusters.get(&**cluster) else { continue };
            let endpoints = cluster.endpoints.load();
            endpoints
                .iter()
                .filter(|endpoint| endpoint.address == *address)
                .for_each(|one| shares::eject(one));
        }
    }

    /// Explains a request on a connection that the listener `entry` accepts, such as `virtualOutbound`. A connection
    /// without a request has no head.
    pub fn explain(
        &self,
        entry: &str,
        connection: &Connection<'_>,
        head: Option<&RequestHead>,
    ) -> Explanation {
        let mut explained = Explanation::default();
        let Some(entry) = self.snapshot.listeners.by_name.get(entry) else {
            explained.outcome = Outcome::Refused(format!("there is no listener {entry}"));
            return explained;
        };
        let listener = filter_chain_match::listener(&self.snapshot, entry, connection.destination);
        explained.listener = listener.name.to_string();
        let findings = arrival::findings(connection, head);
        let facts = filter_chain_match::Facts {
            destination: connection.destination,
            source: connection.source,
            findings: &findings,
        };
        explained.unmatched_chains = chains::unmatched(&listener, &facts);
        let Some(chain) = filter_chain_match::select(&listener, &facts) else {
            explained.outcome = Outcome::Refused("no filter chain matches the connection".to_owned());
            return explained;
        };
        self.chain(&listener, chain, &mut explained);
        let is_tls = connection.tls.is_some();
        if let Some(reason) = self.refused_handshake(connection, chain, &mut explained) {
            explained.outcome = Outcome::Refused(reason);
            return explained;
        }
        let peer = arrival::peer(connection, &explained.certificate);
        let subject = Subject {
            head: None,
            peer: &peer,
            source: connection.source,
            remote: connection.source.ip(),
            destination: connection.destination,
            server_name: findings.server_name.as_deref(),
            metadata: None,
        };
        if !filters::network(self, chain, &subject, &mut explained) {
            return explained;
        }
        match &chain.terminal {
            Terminal::Tcp(proxy) => self.tcp(proxy, connection.destination, &mut explained),
            Terminal::Http(_) if is_tls && !explained.terminates_tls => {
                let reason = "the filter chain expects HTTP in plain text, and the client sends TLS";
                explained.outcome = Outcome::Refused(reason.to_owned());
            }
            Terminal::Http(manager) => match head {
                Some(head) => self.http(manager, &subject, head, &mut explained),
                None => {
                    let reason = "the filter chain expects HTTP, and the client sends no request";
                    explained.outcome = Outcome::Refused(reason.to_owned());
                }
            },
        }
        explained
    }

    /// Describes the filter chain of a connection.
    fn chain(&self, listener: &Listener, chain: &Arc<FilterChain>, explained: &mut Explanation) {
        let position = listener.chains.iter().position(|other| Arc::ptr_eq(other, chain));
        let origin = self.origins.chain(&listener.name, position.unwrap_or(listener.chains.len()));
        explained.has_filter_chain = true;
        explained.filter_chain = chain.name.to_string();
        explained.server_names = chains::server_names(chain);
        explained.filter_chain_origin = origin.map(ToOwned::to_owned);
        explained.terminates_tls = chain.tls.is_some();
    }

    /// Decides about the client's certificate. Returns why the TLS handshake fails; `None` if it does not.
    fn refused_handshake(
        &self,
        connection: &Connection<'_>,
        chain: &FilterChain,
        explained: &mut Explanation,
    ) -> Option<String> {
        let context = chain.tls.as_ref()?;
        let Some(hello) = &connection.tls else {
            return Some("the filter chain expects TLS, and the client sends plain text".to_owned());
        };
        let check = self.tls.client_check(context);
        explained.certificate = match (&check, hello.certificate) {
            (_, None) => CertificateVerdict::Absent,
            (None, Some(_)) => CertificateVerdict::NotRequested,
            (Some((check, secret)), Some(certificate)) => match certificate.verify(check, secret) {
                CertificateVerdict::Refused(reason) if check.accepts_untrusted => {
                    CertificateVerdict::Ignored(reason)
                }
                verdict => verdict,
            },
        };
        let is_required = check.is_some_and(|(check, _)| check.is_mandatory());
        match &explained.certificate {
            CertificateVerdict::Absent if is_required => {
                let reason = "the filter chain requires a client certificate, and the client has none";
                Some(reason.to_owned())
            }
            CertificateVerdict::Refused(reason) => {
                Some(format!("the client certificate is refused: {reason}"))
            }
            _ => None,
        }
    }

    fn tcp(&self, proxy: &TcpProxy, destination: SocketAddr, explained: &mut Explanation) {
        explained.protocol = "tcp";
        explained.timeout = proxy.max_duration.map(|duration| duration.as_secs_f64());
        explained.idle_timeout = proxy.idle_timeout.map(|timeout| timeout.as_secs_f64());
        let sends = EndpointProtocol::Bytes { is_tunnel: proxy.tunnel.is_some() };
        let mut add = |name: &str, share: f64| {
            let target = self.target(name, share, destination, sends, 0);
            explained.targets.push(target);
        };
        match &proxy.targets {
            Targets::Single(cluster) => add(cluster, 1.0),
            Targets::Weighted { total, targets } => {
                target::weighted(*total, targets).for_each(|(target, share)| add(&target.cluster, share));
            }
            Targets::Header(_) => {}
        }
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
        if let Some(outcome) = arrival::refusal(manager, &mut head) {
            explained.outcome = outcome;
            return;
        }
        let arrival = Hop {
            source: subject.source.ip(),
            own: hop::own_address,
            local_port: subject.destination.port(),
            tls: subject.peer.tls,
            certified: subject.peer.certificate.is_some(),
            forwarded_cert: None,
        };
        let remote = headers::receive(manager, arrival, &mut head, &mut fastrand::Rng::with_seed(0));
        let table = self.table(&manager.routes);
        explained.route_table = match &manager.routes {
            Routes::Inline(table) => table.name.to_string(),
            Routes::Named(name) => name.to_string(),
        };
        let found = self.route(&table, &head, None, explained);
        let mut passage = Passage {
            configuration: self,
            manager,
            table: &table,
            subject: Subject { remote, ..*subject },
            head,
            metadata: Map::new(),
            found,
        };
        let admitted = passage.filter(explained);
        let Passage { head, found, .. } = passage;
        let Some((host, route)) = found.ok().filter(|_| admitted) else { return };
        let connection = (subject.destination, manager.istio_alpn);
        self.act((&table.routes, host, route), &head, connection, explained);
        if explained.idle_timeout.is_none() {
            explained.idle_timeout = manager.stream_idle_timeout.map(|timeout| timeout.as_secs_f64());
        }
    }

    /// Returns the route table of a connection manager.
    fn table(&self, routes: &Routes) -> FoundTable {
        let found = match routes {
            Routes::Inline(table) => Ok(Arc::clone(table)),
            Routes::Named(name) => self.snapshot.routes.get(name).cloned().ok_or_else(|| self.absence(name)),
        };
        match found {
            Ok(routes) => FoundTable { routes, absence: None },
            Err(absence) => FoundTable { routes: Arc::default(), absence: Some(absence) },
        }
    }

    /// Returns why there is no route table.
    fn absence(&self, table: &str) -> String {
        match self.refused.iter().any(|(name, _)| name == table) {
            true => format!("the proxy refuses the route table {table}, and has no earlier version of it"),
            false => format!("the route table {table} does not exist"),
        }
    }

    /// Finds the route, and records why the routes before it do not match, or why there is none.
    fn route<'a>(
        &self,
        FoundTable { routes: table, absence }: &'a FoundTable,
        head: &RequestHead,
        metadata: Option<&Map<String, Value>>,
        explained: &mut Explanation,
    ) -> Result<(&'a VirtualHost, &'a Route), NoRoute> {
        explained.routes.clear();
        explained.outcome = Outcome::Forwarded;
        let Some((host, exact)) = route::virtual_host(table, head.authority()) else {
            let no_domain =
                || format!("no virtual host has the domain {}{}", head.authority(), others(table));
            let reason = absence.clone().unwrap_or_else(no_domain);
            explained.outcome = Outcome::Responded(NOT_FOUND, reason);
            return Err(NoRoute::NoMatch);
        };
        explained.virtual_host = host.name.to_string();
        explained.is_exact_domain = exact;
        if host.require_tls && !route::is_secure(head) {
            explained.outcome = Outcome::Responded(301, "the virtual host requires TLS".to_owned());
            return Err(NoRoute::TlsRequired);
        }
        for (index, route) in host.routes.iter().enumerate() {
            let fraction = route.matches.fraction;
            let never = || (fraction == Some(0)).then(|| "the route is for 0 % of the requests".to_owned());
            let mismatch = route::mismatch(&route.matches, head, metadata).or_else(never);
            let share = fraction.filter(|share| *share < ALL);
            let taken = mismatch.is_none() && share.is_none();
            explained.routes.push(RouteReport {
                index,
                name: route.name.to_string(),
                origin: self.origins.route(&table.name, &host.name, index).map(ToOwned::to_owned),
                mismatch,
                share: share.map(|share| f64::from(share) / f64::from(ALL)),
            });
            // Other requests continue after a route for a fraction of requests, so the search continues too.
            if taken {
                return Ok((host, route));
            }
        }
        let reason = match host.routes.is_empty() {
            true => "the virtual host has no routes",
            false => "no route of the virtual host matches the request",
        };
        explained.outcome = Outcome::Responded(NOT_FOUND, reason.to_owned());
        Err(NoRoute::NoMatch)
    }

    fn act(
        &self,
        place: (&RouteTable, &VirtualHost, &Route),
        head: &RequestHead,
        connection: (SocketAddr, bool),
        explained: &mut Explanation,
    ) {
        match &place.2.action {
            Action::Forward(forward) => {
                let seconds = |timeout: Option<std::time::Duration>| timeout.map(|time| time.as_secs_f64());
                explained.timeout = seconds(forward.timeout);
                explained.idle_timeout = seconds(forward.idle_timeout);
                explained.retry = forward.retry.as_deref().map(target::retries);
                explained.mirrors = forward.mirrors.iter().map(|mirror| mirror.cluster.to_string()).collect();
                self.forward(place, forward, head, connection, explained);
            }
            Action::Redirect(redirect) => {
                let mut target = head.copy();
                if let Some(RedirectPath::Rewritten(rewrite)) = &redirect.path {
                    rewrite_path(&mut target, rewrite, &place.2.matches);
                }
                let location = route::location(redirect, &target, head.scheme());
                explained.outcome = Outcome::Responded(redirect.status, format!("redirect to {location}"));
            }
            Action::Direct(direct) => {
                explained.outcome = Outcome::Responded(direct.status, "direct response".to_owned());
            }
        }
    }

    fn forward(
        &self,
        (table, host, route): (&RouteTable, &VirtualHost, &Route),
        forward: &Forward,
        head: &RequestHead,
        (destination, istio): (SocketAddr, bool),
        explained: &mut Explanation,
    ) {
        let mut add = |target: Option<&Weighted>, share: f64| {
            let found = Found { table, host, route, target, exact: explained.is_exact_domain };
            let Some(name) = forward.cluster(target, head) else {
                let reason = "the request has no header that names the cluster".to_owned();
                let sends = EndpointProtocol::Bytes { is_tunnel: false };
                let mut target = self.target("", share, destination, sends, 0);
                target.failure = Some((forward.cluster_not_found, reason));
                explained.targets.push(target);
                return;
            };
            let changes = target::forwarded(&found, forward, head);
            let sends = EndpointProtocol::Http { head: &changes.head, istio };
            let mut target = self.target(name, share, destination, sends, forward.cluster_not_found);
            target.rewritten_path = changes.path;
            target.rewritten_host = changes.host;
            target.header_changes = changes.headers;
            target.head = Some(changes.head);
            explained.targets.push(target);
        };
        match &forward.targets {
            Targets::Weighted { total, targets } => {
                target::weighted(*total, targets).for_each(|(target, share)| add(Some(target), share));
            }
            Targets::Single(_) | Targets::Header(_) => add(None, 1.0),
        }
    }

    fn target(
        &self,
        name: &str,
        share: f64,
        destination: SocketAddr,
        sends: EndpointProtocol<'_>,
        not_found: u16,
    ) -> Target {
        let cluster = self.snapshot.clusters.get(name);
        let report = cluster.map(|cluster| {
            let report = target::describe(cluster, destination, sends, &self.origins);
            ClusterReport { knows_ejections: self.knows_ejections, ..report }
        });
        let is_http = matches!(sends, EndpointProtocol::Http { .. });
        let failure = match &report {
            None => Some((not_found, "the cluster does not exist".to_owned())),
            Some(report) if !report.resolves.is_empty() => None,
            Some(report) if report.endpoints.iter().any(|endpoint| endpoint.is_candidate) => None,
            Some(report) if report.endpoints.is_empty() => {
                Some((if is_http { UNAVAILABLE } else { 0 }, "the cluster has no endpoint".to_owned()))
            }
            Some(_) => {
                let reason = "the cluster has no healthy endpoint".to_owned();
                Some((if is_http { UNAVAILABLE } else { 0 }, reason))
            }
        };
        Target {
            cluster: name.to_owned(),
            share,
            report,
            failure,
            head: None,
            rewritten_path: None,
            rewritten_host: None,
            header_changes: Vec::new(),
        }
    }
}

/// Route table of a connection manager.
struct FoundTable {
    routes: Arc<RouteTable>,
    /// Reason why the proxy does not have it. It is empty then.
    absence: Option<String>,
}

/// Returns the domains of a route table as the end of a sentence.
fn others(table: &RouteTable) -> String {
    let wildcards = table.suffixes.iter().map(|(end, _)| format!("*{end}"));
    let domains: BTreeSet<String> = table.exact.keys().map(ToString::to_string).chain(wildcards).collect();
    let more = domains.len().saturating_sub(MAX_DOMAINS);
    let shown = domains.into_iter().take(MAX_DOMAINS).collect::<Vec<_>>().join(", ");
    match (shown.is_empty(), more) {
        (true, _) => String::new(),
        (false, 0) => format!("; there is {shown}"),
        (false, more) => format!("; there is {shown} and {more} more"),
    }
}

/// Stores the trusted roots of a secret in the contexts that name it.
fn trust(tls: &TlsContexts, name: &str, body: &[u8]) -> Result<(), Reject> {
    let secret = Secret::from_slice(body).map_err(|error| Reject::new(error.to_string()))?;
    let Some(secret::Type::ValidationContext(context)) = &secret.r#type else { return Ok(()) };
    let is_file = |source: &DataSource| matches!(source.specifier, Some(Specifier::Filename(_)));
    // A file of the proxy's pod is not one of this machine.
    if context.trusted_ca.iter().chain(&context.crl).any(is_file) {
        return Ok(());
    }
    let named = tls.names().into_iter().filter(|known| *known.name == *name);
    named.into_iter().try_for_each(|known| translate::store_secret(tls, &known, &secret).map(drop))
}

#[cfg(test)]
mod tests;
