//! The places that a request reaches behind a proxy: workloads, further gateways, and addresses outside.

use std::{
    cell::Cell,
    collections::HashMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
};

use skysail_core::SpiffeId;
use skysail_http::head::RequestHead;
use skysail_proxy::explain::{
    CallerCertificate, ClientHello, Connection, Explanation, Outcome as Decided, Target, TlsReport,
};
use skysail_sandbox::OfflinePod;

use super::{
    ends::{JourneyEnd, answered, outside, ratio, summary},
    gateway,
    hop::{self, INBOUND, Place, Received},
    proxies::{Proxies, Proxy},
    report::{Destination, Hop, Party},
    request::without_port,
    sources::Sources,
};

/// Source port of clients.
pub(super) const CLIENT_PORT: u16 = 40_000;
/// Maximum number of gateways in a row.
const MAX_GATEWAYS: usize = 6;
/// End of requests that take a route for a fraction of the requests.
const FRACTION: &str = "the requests take a route for a fraction of the requests";
/// Maximum number of places in a report.
const MAX_PLACES: usize = 200;

/// Content of a connection.
pub(super) struct Payload {
    /// The client itself sends TLS: SNI.
    pub(super) tls: Option<String>,
    /// Its certificate.
    pub(super) certificate: Option<CallerCertificate>,
    pub(super) head: Option<RequestHead>,
}

/// A connection on its way to a proxy or a program.
#[derive(Clone)]
pub(super) struct IncomingConnection<'a> {
    pub(super) source: SocketAddr,
    pub(super) destination: SocketAddr,
    /// TLS of the proxy before.
    pub(super) tls: Option<&'a TlsReport>,
    /// Identity of the proxy before.
    pub(super) principal: Option<String>,
    pub(super) payload: &'a Payload,
    /// Cluster of the proxy before; empty for none.
    pub(super) cluster: &'a str,
    /// Share of all requests, from 0 to 1.
    pub(super) share: f64,
    /// Decisions of the gateways that the connection has passed.
    pub(super) passed: &'a [String],
}

impl<'a> IncomingConnection<'a> {
    /// Returns the connection of a client as it leaves the client's pod.
    pub(super) fn new(source: SocketAddr, destination: SocketAddr, payload: &'a Payload) -> Self {
        let (tls, principal) = (None, None);
        Self { source, destination, tls, principal, payload, cluster: "", share: 1.0, passed: &[] }
    }

    /// Returns a place that receives the connection.
    fn place(&self, endpoint: String, endpoints: usize, end: JourneyEnd) -> Destination {
        Destination::new(self.cluster, self.share, (endpoint, endpoints), self.payload.head.as_ref(), end)
    }
}

/// Follows requests through a mesh.
pub(super) struct Follower<'a> {
    pub(super) proxies: &'a Proxies<'a>,
    pub(super) sources: Sources<'a>,
    /// Number of further places that the report may have.
    left: Cell<usize>,
    /// Number of places beyond that.
    cut: Cell<usize>,
}

/// Endpoints that are the same port of one workload.
struct PlaceGroup<T> {
    /// One of them.
    first: T,
    count: usize,
    /// Share of the requests to all groups, from 0 to 1.
    share: f64,
}

/// Combines items with equal keys, and adds their shares.
fn groups<T>(items: impl Iterator<Item = (String, f64, T)>) -> Vec<PlaceGroup<T>> {
    let mut found: Vec<PlaceGroup<T>> = Vec::new();
    let mut known: HashMap<String, usize> = HashMap::new();
    for (key, share, first) in items {
        let index = *known.entry(key).or_insert(found.len());
        match found.get_mut(index) {
            Some(group) => {
                group.count += 1;
                group.share += share;
            }
            None => found.push(PlaceGroup { first, count: 1, share }),
        }
    }
    found
}

impl<'a> Follower<'a> {
    pub(super) fn new(proxies: &'a Proxies<'a>) -> Self {
        let sources = Sources { world: &proxies.mesh.world };
        Self { proxies, sources, left: Cell::new(MAX_PLACES), cut: Cell::new(0) }
    }

    /// Returns a remark about places that the limit of the report leaves out.
    pub(super) fn note(&self) -> Option<String> {
        let cut = self.cut.get();
        (cut > 0).then(|| format!("the report has at most {MAX_PLACES} places: {cut} more are not explained"))
    }
}

impl Follower<'_> {
    pub(super) fn party(&self, pod: &OfflinePod) -> Party {
        Party {
            workload: format!("{}/{}", pod.namespace, pod.owner.name),
            pod: pod.name.clone(),
            address: pod.address.to_string(),
            principal: pod.sidecar.then(|| self.principal(pod)),
            source: Some(self.sources.of(&pod.owner, "")),
        }
    }

    fn principal(&self, pod: &OfflinePod) -> String {
        let domain = self.proxies.mesh.world.mesh().trust_domain.clone();
        SpiffeId::new(domain, &pod.namespace, &pod.account).to_string()
    }

    /// Returns the destinations of a connection that no sidecar of the client takes.
    pub(super) fn direct(
        &self,
        arriving: &IncomingConnection<'_>,
        ip: Ipv4Addr,
        port: u16,
    ) -> Vec<Destination> {
        let Some(backends) = self.proxies.mesh.backends(ip, port) else {
            return vec![self.arrive(arriving, 1)];
        };
        let keyed = backends.iter().map(|(address, port)| {
            let pod = self.proxies.mesh.pod_at((*address).into());
            let key = pod.map_or_else(|| address.to_string(), |pod| format!("{} {port}", pod.owner));
            (key, 0.0, SocketAddr::new((*address).into(), *port))
        });
        let mut groups = groups(keyed);
        groups.iter_mut().for_each(|group| group.share = ratio(group.count, backends.len()));
        self.each(&groups, arriving, |group, share| {
            let destination = group.first;
            let arriving = IncomingConnection { destination, principal: None, share, ..arriving.clone() };
            vec![self.arrive(&arriving, group.count)]
        })
    }

    pub(super) fn explain(
        &self,
        proxy: &Proxy,
        entry: &str,
        arriving: &IncomingConnection<'_>,
    ) -> Explanation {
        let payload = arriving.payload;
        // Inside of TLS between proxies, a client's own TLS hides the request.
        let head = payload.head.as_ref().filter(|_| payload.tls.is_none() || arriving.tls.is_none());
        let own = match head {
            Some(_) => vec!["h2".to_owned(), "http/1.1".to_owned()],
            None => Vec::new(),
        };
        let unnamed = || arriving.tls.filter(|tls| tls.has_certificate).map(|_| CallerCertificate::unnamed());
        let workload = arriving.principal.as_deref().map(CallerCertificate::of_workload).or_else(unnamed);
        let tls = match (arriving.tls, &payload.tls) {
            (Some(tls), _) => Some(ClientHello {
                server_name: &tls.server_name,
                alpn: &tls.alpn,
                certificate: workload.as_ref(),
            }),
            (None, Some(name)) => Some(ClientHello {
                server_name: if name.parse::<IpAddr>().is_ok() { "" } else { name },
                alpn: &own,
                certificate: payload.certificate.as_ref(),
            }),
            (None, None) => None,
        };
        let IncomingConnection { source, destination, .. } = *arriving;
        proxy.configuration.explain(entry, &Connection { source, destination, tls }, head)
    }

    pub(super) fn hop(
        &self,
        place: &Place<'_>,
        explained: &Explanation,
        arriving: &IncomingConnection<'_>,
    ) -> Hop {
        let payload = arriving.payload;
        let own_name = payload.tls.as_deref().filter(|name| name.parse::<IpAddr>().is_err());
        let own_certificate = payload.certificate.as_ref().map(CallerCertificate::name);
        let received = Received {
            destination: arriving.destination,
            tls: arriving.tls,
            client_tls: payload.tls.is_some(),
            server_name: arriving.tls.map_or(own_name.unwrap_or_default(), |tls| &tls.server_name),
            host: payload.head.as_ref().map_or("", |head| without_port(head.authority())),
            principal: arriving.principal.as_deref().or(own_certificate),
        };
        hop::describe(&self.sources, place, explained, &received)
    }

    /// Returns the end of a request that a proxy does not forward.
    pub(super) fn end(&self, hop: &Hop, explained: &Explanation) -> Option<JourneyEnd> {
        let proxy = format!("the proxy of {}", hop.proxy);
        let end = match &explained.outcome {
            Decided::Forwarded if explained.targets.is_empty() => {
                Some(JourneyEnd::closed(format!("{proxy} has no cluster for it")))
            }
            Decided::Forwarded => None,
            Decided::Responded(status, reason) => Some(JourneyEnd::responded(
                *status,
                format!("{proxy} responds with {status}: {}", self.blamed(hop, reason)),
            )),
            Decided::Refused(reason) => Some(JourneyEnd::closed(format!(
                "{proxy} closes the connection: {}",
                self.blamed(hop, reason)
            ))),
        };
        end.map(|end| end.of_fraction(explained.explained_share()))
    }

    /// Adds the policies that refuse to a reason.
    fn blamed(&self, hop: &Hop, reason: &str) -> String {
        let refusing =
            hop.filters.iter().find(|step| !step.action.is_empty() && step.enforced && !step.allowed);
        if let Some(step) = refusing {
            let objects: Vec<String> = step.sources.iter().map(|source| source.object.clone()).collect();
            let objects = objects.join(", ");
            return match step.matched.is_empty() {
                true => format!("no rule of the {} policies allows it ({objects})", step.action),
                false => format!("it matches a {} rule of {objects}", step.action),
            };
        }
        let mut tokens = hop.filters.iter().flat_map(|step| &step.tokens);
        if let Some(token) = tokens.find(|token| !token.refused.is_empty())
            && hop.outcome.status.is_some_and(|status| [401, 403].contains(&status))
        {
            let object = token.source.as_ref().map(|source| format!(" ({})", source.object));
            return format!("{}{}", token.refused, object.unwrap_or_default());
        }
        if hop.mtls_mode == "STRICT" && hop.filter_chain.name.is_empty() {
            return format!("{reason}: mutual TLS is STRICT");
        }
        reason.to_owned()
    }

    /// Returns the destinations of the targets of a proxy. `from` is the connection that it has received.
    pub(super) fn onwards(
        &self,
        pod: &OfflinePod,
        explained: &Explanation,
        from: &IncomingConnection<'_>,
    ) -> Vec<Destination> {
        let mut found = Vec::new();
        let explained_share = explained.explained_share();
        for target in explained.targets.iter().filter(|target| target.share > 0.0) {
            let payload = match (&target.head, explained.protocol) {
                (Some(head), "http") => Payload { tls: None, certificate: None, head: Some(head.copy()) },
                _ => Payload {
                    tls: from.payload.tls.clone().filter(|_| from.tls.is_some() || !explained.terminates_tls),
                    certificate: from.payload.certificate.clone(),
                    head: from.payload.head.as_ref().map(RequestHead::copy),
                },
            };
            let leaving = IncomingConnection {
                source: SocketAddr::new(pod.address.into(), CLIENT_PORT),
                tls: None,
                principal: None,
                payload: &payload,
                cluster: &target.cluster,
                share: from.share * explained_share * target.share,
                ..*from
            };
            let places = self.of_target(pod, target, &leaving).into_iter();
            match explained.protocol {
                "http" => found.extend(places.map(answered)),
                _ => found.extend(places),
            }
        }
        if explained_share < 1.0 {
            let share = from.share * (1.0 - explained_share);
            let rest = IncomingConnection { share, cluster: "", ..from.clone() };
            found.push(rest.place(String::new(), 0, JourneyEnd::unknown(FRACTION.to_owned())));
        }
        found
    }

    fn of_target(
        &self,
        pod: &OfflinePod,
        target: &Target,
        leaving: &IncomingConnection<'_>,
    ) -> Vec<Destination> {
        if let Some((status, reason)) = &target.failure {
            let end = match status {
                0 => JourneyEnd::closed(format!("the connection is closed: {reason}")),
                status => JourneyEnd::responded(*status, format!("{status}: {reason}")),
            };
            return vec![leaving.place(String::new(), 0, end)];
        }
        let Some(report) = &target.report else { return Vec::new() };
        if report.endpoints.is_empty() {
            let names = report.resolves.join(", ");
            let end = outside(&format!("the address of {names}"));
            return vec![leaving.place(names, 1, end)];
        }
        let candidates = report.endpoints.iter().filter(|endpoint| endpoint.is_candidate);
        let groups = groups(candidates.map(|endpoint| {
            let address = endpoint.address.parse::<SocketAddr>().ok();
            let pod = address.and_then(|address| self.proxies.mesh.pod_at(address.ip()));
            let key = match (pod, address) {
                (Some(pod), Some(address)) => format!("{} {}", pod.owner, address.port()),
                _ => endpoint.address.clone(),
            };
            (key, endpoint.share, (endpoint, address))
        }));
        self.each(&groups, leaving, |group, share| {
            let (endpoint, address) = group.first;
            let leaving = IncomingConnection { share, ..leaving.clone() };
            let Some(destination) = address else {
                let end = outside(&endpoint.address);
                return vec![leaving.place(endpoint.address.clone(), group.count, end)];
            };
            let is_mesh = endpoint.tls.as_ref().is_some_and(|tls| tls.is_mesh);
            let principal = is_mesh.then(|| self.principal(pod));
            let arriving =
                IncomingConnection { destination, tls: endpoint.tls.as_ref(), principal, ..leaving };
            // The endpoint may be the address of a Service.
            match destination.ip() {
                IpAddr::V4(ip) if self.proxies.mesh.backends(ip, destination.port()).is_some() => {
                    self.direct(&arriving, ip, destination.port())
                }
                _ => vec![self.arrive(&arriving, group.count)],
            }
        })
    }

    /// Follows a connection to each group, with the share of the group in all requests. The groups beyond the
    /// limit of the report are one place.
    fn each<T>(
        &self,
        groups: &[PlaceGroup<T>],
        leaving: &IncomingConnection<'_>,
        follow: impl Fn(&PlaceGroup<T>, f64) -> Vec<Destination>,
    ) -> Vec<Destination> {
        let mut found = Vec::new();
        for (index, group) in groups.iter().enumerate() {
            if self.left.get() == 0 {
                let rest = groups.get(index..).unwrap_or_default();
                let part: f64 = rest.iter().map(|group| group.share).sum();
                let leaving = IncomingConnection { share: leaving.share * part, ..leaving.clone() };
                let endpoints = rest.iter().map(|group| group.count).sum();
                found.push(self.left_out(&leaving, rest.len(), endpoints));
                break;
            }
            found.extend(follow(group, leaving.share * group.share));
        }
        found
    }

    /// Returns a place for those beyond the limit of the report.
    fn left_out(&self, arriving: &IncomingConnection<'_>, places: usize, endpoints: usize) -> Destination {
        self.cut.set(self.cut.get() + places);
        let more = if places == 1 { "a place".to_owned() } else { format!("{places} places") };
        let result = format!("{more} beyond the limit of {MAX_PLACES} places");
        arriving.place(String::new(), endpoints, JourneyEnd::unknown(result))
    }

    /// Follows a connection at its destination, which is one of several equal endpoints.
    pub(super) fn arrive(&self, arriving: &IncomingConnection<'_>, endpoints: usize) -> Destination {
        let Some(left) = self.left.get().checked_sub(1) else {
            return self.left_out(arriving, 1, endpoints);
        };
        self.left.set(left);
        let address = arriving.destination;
        let place = |end| arriving.place(address.to_string(), endpoints, end);
        let Some(pod) = self.proxies.mesh.pod_at(address.ip()) else {
            return place(outside(&address.to_string()));
        };
        let party = self.party(pod);
        if !pod.gateway && !pod.intercepts_inbound(address.port()) {
            let program = format!("the program of {}", party.workload);
            let end = match arriving.tls {
                Some(tls) if tls.is_mesh => {
                    JourneyEnd::closed(format!("{program} receives mutual TLS that no sidecar accepts"))
                }
                _ => JourneyEnd::served(format!("{program} receives it")),
            };
            return Destination { to: Some(party), ..place(end) };
        }
        if pod.gateway && arriving.passed.len() >= MAX_GATEWAYS {
            let result = format!("the request passes more than {MAX_GATEWAYS} gateways");
            return Destination { to: Some(party), ..place(JourneyEnd::unknown(result)) };
        }
        match self.proxies.of(pod) {
            Some(proxy) => {
                let workload = party.workload.clone();
                let found = self.at_proxy(arriving, (pod, &proxy), &workload, &place);
                Destination { to: Some(party), ..found }
            }
            None => {
                let end = JourneyEnd::closed("the control plane refuses the proxy".to_owned());
                Destination { to: Some(party), ..place(end) }
            }
        }
    }

    /// Follows a connection at the proxy of its destination. `place` returns the destination with an end.
    fn at_proxy(
        &self,
        arriving: &IncomingConnection<'_>,
        (pod, proxy): (&OfflinePod, &Proxy),
        workload: &str,
        place: &impl Fn(JourneyEnd) -> Destination,
    ) -> Destination {
        let at = Place { pod, proxy, direction: if pod.gateway { "gateway" } else { "inbound" } };
        let entry = match pod.gateway {
            false => Ok(INBOUND.to_owned()),
            true => gateway::listener(proxy, arriving.destination),
        };
        let explained = match entry {
            Ok(entry) => self.explain(proxy, &entry, arriving),
            Err(reason) => Explanation { outcome: Decided::Refused(reason), ..Explanation::default() },
        };
        let hop = self.hop(&at, &explained, arriving);
        let mut end = self.end(&hop, &explained);
        let mut next = Vec::new();
        if end.is_none() && pod.gateway {
            let decision = decision(workload, &explained);
            if arriving.passed.contains(&decision) {
                let result = format!("the request returns to the gateway {workload}, on the same route");
                return place(JourneyEnd::refused(result));
            }
            let passed = [arriving.passed, &[decision]].concat();
            let from = IncomingConnection { passed: &passed, ..arriving.clone() };
            next = self.onwards(pod, &explained, &from);
            end = Some(summary(&next));
        }
        let served = || {
            let end = JourneyEnd::served(format!("the program of {workload} receives it"));
            end.of_fraction(explained.explained_share())
        };
        let mut found = place(end.unwrap_or_else(served));
        if let Some(head) = explained.targets.first().and_then(|target| target.head.as_ref()) {
            (found.path, found.authority) = (head.path().to_owned(), head.authority().to_owned());
        }
        Destination { hop: Some(hop), next, ..found }
    }
}

/// Returns the decision of a gateway about a request. A gateway that takes the same decision twice about a
/// request repeats it without end.
fn decision(workload: &str, explained: &Explanation) -> String {
    let taken = explained.routes.iter().filter(|route| route.mismatch.is_none()).map(|route| route.index);
    let Explanation { listener, filter_chain, server_names, virtual_host, .. } = explained;
    let (names, routes) = (server_names.join(" "), taken.collect::<Vec<_>>());
    format!("{workload}, {listener}, {filter_chain}, {names}, {virtual_host}, {routes:?}")
}
