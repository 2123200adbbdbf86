//! The path of a request from proxy to proxy.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use skysail_core::SpiffeId;
use skysail_http::head::RequestHead;
use skysail_model::Severity;
use skysail_proxy::explain::{
    CallerCertificate, ClientHello, Connection, EndpointReport, Explanation, Outcome as Decided, Target,
    TlsReport,
};
use skysail_sandbox::{Lookup, OfflinePod};

use super::{
    ends::{JourneyEnd, answered, outside, ratio, summary},
    gateway,
    hop::{self, INBOUND, OUTBOUND, Place, Received},
    proxies::{Proxies, Proxy},
    report::{Destination, Dns, ExplainReport, Hop, Party},
    request::{ParsedRequest, without_port},
    sources::Sources,
};

/// Address that stands for one outside the mesh, of a network for documentation (RFC 5737).
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// Source port of clients.
const CLIENT_PORT: u16 = 40_000;
/// Maximum number of proxies in a row.
const MAX_HOPS: usize = 6;
/// Maximum number of workloads of a cluster that are followed.
const MAX_WORKLOADS: usize = 8;
/// Maximum number of errors of the configuration in a report.
const MAX_ERRORS: usize = 20;

/// Client of a request.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    /// A pod of the mesh.
    Pod(&'a OfflinePod),
    /// A client outside the mesh.
    Outside {
        /// Its address.
        address: Ipv4Addr,
        /// Gateway that it connects to; `None` selects one by port and host.
        gateway: Option<&'a str>,
    },
}

/// Content of a connection.
struct Payload {
    /// The client itself sends TLS: SNI.
    tls: Option<String>,
    /// Its certificate.
    certificate: Option<CallerCertificate>,
    head: Option<RequestHead>,
}

/// A connection on its way to a proxy or a program.
struct IncomingConnection<'a> {
    source: SocketAddr,
    destination: SocketAddr,
    /// TLS of the proxy before.
    tls: Option<&'a TlsReport>,
    /// Identity of the proxy before.
    principal: Option<String>,
    payload: &'a Payload,
    hops: usize,
}

/// Follows requests through a mesh.
struct Follower<'a> {
    proxies: &'a Proxies<'a>,
    sources: Sources<'a>,
}

/// Follows a request.
pub(super) fn follow(proxies: &Proxies<'_>, start: &Start<'_>, request: &ParsedRequest) -> ExplainReport {
    let follower = Follower { proxies, sources: Sources { world: &proxies.mesh.world } };
    let mut report = ExplainReport {
        from: follower.client(start),
        request: request.shown.clone(),
        errors: errors(proxies),
        dns: None,
        client: None,
        notes: Vec::new(),
        destinations: Vec::new(),
        served: false,
        status: None,
        result: String::new(),
    };
    let payload = Payload {
        tls: request.tls.then(|| request.host.clone()),
        certificate: request.certificate.clone(),
        head: request.head.as_ref().map(RequestHead::copy),
    };
    let end = match start {
        Start::Pod(pod) => follower.follow_pod(pod, request, &payload, &mut report),
        Start::Outside { address, gateway } => {
            follower.follow_outside((*address, *gateway), request, &payload, &mut report)
        }
    };
    report.notes.extend(proxies.notes());
    let JourneyEnd { served, status, result } = end.unwrap_or_else(|| summary(&report.destinations));
    (report.served, report.status, report.result) = (served, status, result);
    report
}

fn errors(proxies: &Proxies<'_>) -> Vec<String> {
    let errors = proxies.mesh.findings.iter().filter(|finding| finding.severity == Severity::Error);
    let total = errors.clone().count();
    let mut shown: Vec<String> = errors.take(MAX_ERRORS).map(ToString::to_string).collect();
    if total > MAX_ERRORS {
        shown.push(format!("{} more errors", total - MAX_ERRORS));
    }
    shown
}

impl Follower<'_> {
    fn client(&self, start: &Start<'_>) -> Party {
        match start {
            Start::Pod(pod) => self.party(pod),
            Start::Outside { address, .. } => Party {
                workload: "outside".to_owned(),
                pod: String::new(),
                address: address.to_string(),
                principal: None,
                source: None,
            },
        }
    }

    fn party(&self, pod: &OfflinePod) -> Party {
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

    /// Follows a request of a pod. Returns its end if it ends before any destination.
    fn follow_pod(
        &self,
        pod: &OfflinePod,
        request: &ParsedRequest,
        payload: &Payload,
        report: &mut ExplainReport,
    ) -> Option<JourneyEnd> {
        let address = match self.look_up(pod, request, report) {
            Ok(address) => address,
            Err(reason) => return Some(JourneyEnd { served: false, status: None, result: reason }),
        };
        let destination = SocketAddr::new(address, request.port);
        let source = SocketAddr::new(pod.address.into(), CLIENT_PORT);
        let arriving =
            IncomingConnection { source, destination, tls: None, principal: None, payload, hops: 0 };
        let IpAddr::V4(ip) = address else {
            let result = "IPv6 addresses are not explained: the mesh has IPv4 addresses only".to_owned();
            return Some(JourneyEnd { served: false, status: None, result });
        };
        // A listener of a Sidecar with captureMode NONE has a socket of its own.
        let listening = self
            .proxies
            .of(pod)
            .filter(|_| ip.is_loopback())
            .and_then(|proxy| proxy.configuration.listening_at(destination).map(ToOwned::to_owned));
        if listening.is_none() && ip.is_loopback() {
            report.destinations = vec![self.within(pod, destination, payload)];
            return None;
        }
        if listening.is_none() && !pod.intercepts_outbound(ip, request.port) {
            report.notes.push(match pod.sidecar {
                false => "the client has no sidecar: its connections are not changed".to_owned(),
                true => format!(
                    "the client's sidecar does not take this connection (annotations traffic.sidecar.istio.io/*, \
                     or a gateway): {destination} is dialled as it is"
                ),
            });
            report.destinations = self.direct(&arriving, ip, request.port);
            return None;
        }
        let Some(proxy) = self.proxies.of(pod) else {
            let result = "the control plane refuses the client's sidecar".to_owned();
            return Some(JourneyEnd { served: false, status: None, result });
        };
        let explained = self.explain(&proxy, listening.as_deref().unwrap_or(OUTBOUND), &arriving);
        let place = Place { pod, proxy: &proxy, direction: "outbound" };
        let hop = self.hop(&place, &explained, &arriving);
        let end = self.end(&hop, &explained);
        report.client = Some(hop);
        if end.is_none() {
            report.destinations = self.onwards(pod, &explained, &arriving);
        }
        end
    }

    fn look_up(
        &self,
        pod: &OfflinePod,
        request: &ParsedRequest,
        report: &mut ExplainReport,
    ) -> Result<IpAddr, String> {
        if let Ok(address) = request.host.parse() {
            return Ok(address);
        }
        let mut dns = Dns {
            host: request.host.clone(),
            name: String::new(),
            addresses: Vec::new(),
            note: String::new(),
        };
        let address = match self.proxies.mesh.look_up(&request.host, pod) {
            Lookup::Found(name, addresses) => {
                dns.addresses = addresses.iter().map(ToString::to_string).collect();
                dns.name.clone_from(&name);
                let first = addresses.first().map(|address| IpAddr::V4(*address));
                first.ok_or(format!("the name {name} has no address: no pod is its endpoint"))
            }
            Lookup::Missing(reason) => {
                let is_outside = request.host.contains('.') && !request.host.ends_with("cluster.local");
                if is_outside {
                    dns.note = format!(
                        "the name is not one of the mesh; {OUTSIDE} stands for an address outside{}",
                        reason.map(|reason| format!(" ({reason})")).unwrap_or_default()
                    );
                    dns.addresses = vec![OUTSIDE.to_string()];
                    Ok(OUTSIDE.into())
                } else {
                    let reason = reason.unwrap_or_else(|| {
                        format!("no Service or ServiceEntry that {} sees has the name", pod.namespace)
                    });
                    dns.note.clone_from(&reason);
                    Err(format!("the name {} has no address: {reason}", request.host))
                }
            }
        };
        report.dns = Some(dns);
        address
    }

    /// Follows a request of a client outside the mesh to a gateway.
    fn follow_outside(
        &self,
        (address, gateway): (Ipv4Addr, Option<&str>),
        request: &ParsedRequest,
        payload: &Payload,
        report: &mut ExplainReport,
    ) -> Option<JourneyEnd> {
        let host = if request.tls { &request.host } else { request.authority() };
        let entrance = match gateway::entrance(self.proxies.mesh, request.port, host, gateway) {
            Ok(entrance) => entrance,
            Err(reason) => return Some(JourneyEnd { served: false, status: None, result: reason }),
        };
        report.notes.extend(Some(entrance.note).filter(|note| !note.is_empty()));
        let source = SocketAddr::new(address.into(), CLIENT_PORT);
        let destination = SocketAddr::new(entrance.pod.address.into(), entrance.port);
        let arriving =
            IncomingConnection { source, destination, tls: None, principal: None, payload, hops: 0 };
        report.destinations = vec![self.arrive(&arriving, "", 1.0, 1)];
        None
    }

    /// Returns the destinations of a connection that no sidecar of the client takes.
    fn direct(&self, arriving: &IncomingConnection<'_>, ip: Ipv4Addr, port: u16) -> Vec<Destination> {
        let Some(backends) = self.proxies.mesh.backends(ip, port) else {
            return vec![self.arrive(arriving, "", 1.0, 1)];
        };
        let mut groups: Vec<(String, (Ipv4Addr, u16), usize)> = Vec::new();
        for (address, port) in backends {
            let pod = self.proxies.mesh.pod_at((*address).into());
            let key = pod.map_or_else(|| address.to_string(), |pod| format!("{} {port}", pod.owner));
            match groups.iter_mut().find(|(known, ..)| *known == key) {
                Some((.., count)) => *count += 1,
                None => groups.push((key, (*address, *port), 1)),
            }
        }
        let found = groups.into_iter().take(MAX_WORKLOADS).map(|(_, (address, port), count)| {
            let destination = SocketAddr::new(address.into(), port);
            let arriving = IncomingConnection { destination, principal: None, ..*arriving };
            self.arrive(&arriving, "", ratio(count, backends.len()), count)
        });
        found.collect()
    }

    /// Returns the destination of a connection that stays in the pod of the client.
    fn within(&self, pod: &OfflinePod, address: SocketAddr, payload: &Payload) -> Destination {
        let party = self.party(pod);
        let result =
            format!("a program in the pod of {} receives it, if one listens on the port", party.workload);
        let end = JourneyEnd { served: true, status: None, result };
        Destination { to: Some(party), ..destination("", 1.0, address.to_string(), 1, payload, end) }
    }

    fn explain(&self, proxy: &Proxy, entry: &str, arriving: &IncomingConnection<'_>) -> Explanation {
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

    fn hop(&self, place: &Place<'_>, explained: &Explanation, arriving: &IncomingConnection<'_>) -> Hop {
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
    fn end(&self, hop: &Hop, explained: &Explanation) -> Option<JourneyEnd> {
        let proxy = format!("the proxy of {}", hop.proxy);
        match &explained.outcome {
            Decided::Forwarded if explained.targets.is_empty() => Some(JourneyEnd {
                served: false,
                status: None,
                result: format!("{proxy} has no cluster for it"),
            }),
            Decided::Forwarded => None,
            Decided::Responded(status, reason) => Some(JourneyEnd {
                served: *status < 400,
                status: Some(*status),
                result: format!("{proxy} responds with {status}: {}", self.blamed(hop, reason)),
            }),
            Decided::Refused(reason) => Some(JourneyEnd {
                served: false,
                status: None,
                result: format!("{proxy} closes the connection: {}", self.blamed(hop, reason)),
            }),
        }
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

    /// Returns the destinations of the targets of a proxy.
    fn onwards(
        &self,
        pod: &OfflinePod,
        explained: &Explanation,
        from: &IncomingConnection<'_>,
    ) -> Vec<Destination> {
        let mut found = Vec::new();
        for target in explained.targets.iter().filter(|target| target.share > 0.0) {
            let payload = match (&target.head, explained.protocol) {
                (Some(head), "http") => Payload { tls: None, certificate: None, head: Some(head.copy()) },
                _ => Payload {
                    tls: from.payload.tls.clone().filter(|_| from.tls.is_some() || !explained.terminates_tls),
                    certificate: from.payload.certificate.clone(),
                    head: from.payload.head.as_ref().map(RequestHead::copy),
                },
            };
            let places = self.of_target(pod, target, &payload, from.hops + 1).into_iter();
            match explained.protocol {
                "http" => found.extend(places.map(answered)),
                _ => found.extend(places),
            }
        }
        found
    }

    fn of_target(
        &self,
        pod: &OfflinePod,
        target: &Target,
        payload: &Payload,
        hops: usize,
    ) -> Vec<Destination> {
        let share = target.share;
        if let Some((status, reason)) = &target.failure {
            let status = (*status > 0).then_some(*status);
            let what = status.map_or("the connection is closed".to_owned(), |status| format!("{status}"));
            let end = JourneyEnd { served: false, status, result: format!("{what}: {reason}") };
            return vec![destination(&target.cluster, share, String::new(), 0, payload, end)];
        }
        let Some(report) = &target.report else { return Vec::new() };
        if report.endpoints.is_empty() {
            let names = report.resolves.join(", ");
            let end = outside(&format!("the address of {names}"));
            return vec![destination(&target.cluster, share, names, 1, payload, end)];
        }
        let groups = self.groups(&report.endpoints);
        let source = SocketAddr::new(pod.address.into(), CLIENT_PORT);
        let followed = groups.iter().take(MAX_WORKLOADS).flat_map(|group| {
            let EndpointGroup { endpoint, count, .. } = group;
            let part = share * group.share;
            let Ok(address) = endpoint.address.parse() else {
                let end = outside(&endpoint.address);
                return vec![destination(
                    &target.cluster,
                    part,
                    endpoint.address.clone(),
                    *count,
                    payload,
                    end,
                )];
            };
            let is_mesh = endpoint.tls.as_ref().is_some_and(|tls| tls.is_mesh);
            let arriving = IncomingConnection {
                source,
                destination: address,
                tls: endpoint.tls.as_ref(),
                principal: is_mesh.then(|| self.principal(pod)),
                payload,
                hops,
            };
            let behind = self.behind_service(&arriving, &target.cluster, part);
            behind.unwrap_or_else(|| vec![self.arrive(&arriving, &target.cluster, part, *count)])
        });
        followed.collect()
    }

    /// Returns the destinations behind an endpoint that is the address of a Service; `None` for other addresses.
    fn behind_service(
        &self,
        arriving: &IncomingConnection<'_>,
        cluster: &str,
        share: f64,
    ) -> Option<Vec<Destination>> {
        let (address, port) = (arriving.destination.ip(), arriving.destination.port());
        let IpAddr::V4(ip) = address else { return None };
        self.proxies.mesh.backends(ip, port)?;
        let found = self.direct(arriving, ip, port).into_iter();
        let of_cluster =
            |to: Destination| Destination { cluster: cluster.to_owned(), share: share * to.share, ..to };
        Some(found.map(of_cluster).collect())
    }

    /// Returns the workloads among the candidates.
    fn groups<'e>(&self, endpoints: &'e [EndpointReport]) -> Vec<EndpointGroup<'e>> {
        let mut groups: Vec<EndpointGroup<'e>> = Vec::new();
        for endpoint in endpoints.iter().filter(|endpoint| endpoint.is_candidate) {
            let address = endpoint.address.parse::<SocketAddr>().ok();
            let pod = address.and_then(|address| self.proxies.mesh.pod_at(address.ip()));
            let key = match (pod, address) {
                (Some(pod), Some(address)) => format!("{} {}", pod.owner, address.port()),
                _ => endpoint.address.clone(),
            };
            match groups.iter_mut().find(|known| known.key == key) {
                Some(known) => {
                    known.count += 1;
                    known.share += endpoint.share;
                }
                None => groups.push(EndpointGroup { key, endpoint, count: 1, share: endpoint.share }),
            }
        }
        groups
    }

    /// Follows a connection at its destination.
    fn arrive(
        &self,
        arriving: &IncomingConnection<'_>,
        cluster: &str,
        share: f64,
        endpoints: usize,
    ) -> Destination {
        let address = arriving.destination;
        let place = |end| destination(cluster, share, address.to_string(), endpoints, arriving.payload, end);
        let Some(pod) = self.proxies.mesh.pod_at(address.ip()) else {
            return place(outside(&address.to_string()));
        };
        let party = self.party(pod);
        let program = format!("the program of {}", party.workload);
        let served = || JourneyEnd { served: true, status: None, result: format!("{program} receives it") };
        if !pod.gateway && !pod.intercepts_inbound(address.port()) {
            let end = match arriving.tls {
                Some(tls) if tls.is_mesh => JourneyEnd {
                    served: false,
                    status: None,
                    result: format!("{program} receives mutual TLS that no sidecar accepts"),
                },
                _ => served(),
            };
            return Destination { to: Some(party), ..place(end) };
        }
        let refused = |result: &str| JourneyEnd { served: false, status: None, result: result.to_owned() };
        if arriving.hops >= MAX_HOPS {
            return Destination { to: Some(party), ..place(refused("the request passes too many proxies")) };
        }
        let Some(proxy) = self.proxies.of(pod) else {
            return Destination { to: Some(party), ..place(refused("the control plane refuses the proxy")) };
        };
        let at = Place { pod, proxy: &proxy, direction: if pod.gateway { "gateway" } else { "inbound" } };
        let entry = match pod.gateway {
            false => Ok(INBOUND.to_owned()),
            true => gateway::listener(&proxy, address),
        };
        let explained = match entry {
            Ok(entry) => self.explain(&proxy, &entry, arriving),
            Err(reason) => Explanation { outcome: Decided::Refused(reason), ..Explanation::default() },
        };
        let hop = self.hop(&at, &explained, arriving);
        let mut end = self.end(&hop, &explained);
        let mut next = Vec::new();
        if end.is_none() && pod.gateway {
            next = self.onwards(pod, &explained, arriving);
            end = Some(summary(&next));
        }
        let mut found = place(end.unwrap_or_else(served));
        if let Some(head) = explained.targets.first().and_then(|target| target.head.as_ref()) {
            (found.path, found.authority) = (head.path().to_owned(), head.authority().to_owned());
        }
        Destination { to: Some(party), hop: Some(hop), next, ..found }
    }
}

/// Endpoints of a cluster that are the same port of one workload.
struct EndpointGroup<'e> {
    key: String,
    /// One of them.
    endpoint: &'e EndpointReport,
    count: usize,
    /// Share of the requests to the cluster, from 0 to 1.
    share: f64,
}

fn destination(
    cluster: &str,
    share: f64,
    endpoint: String,
    endpoints: usize,
    payload: &Payload,
    JourneyEnd { served, status, result }: JourneyEnd,
) -> Destination {
    let head = payload.head.as_ref();
    Destination {
        cluster: cluster.to_owned(),
        share,
        endpoint,
        endpoints,
        to: None,
        hop: None,
        next: Vec::new(),
        path: head.map(|head| head.path().to_owned()).unwrap_or_default(),
        authority: head.map(|head| head.authority().to_owned()).unwrap_or_default(),
        served,
        status,
        result,
    }
}
