//! The path of a request from proxy to proxy.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use skysail_core::SpiffeId;
use skysail_http::head::RequestHead;
use skysail_model::Severity;
use skysail_proxy::explain::{
    ClientHello, Connection, EndpointReport, Explanation, Outcome as Decided, Target, TlsReport,
};
use skysail_sandbox::{Lookup, OfflinePod};

use super::{
    hop::{self, INBOUND, OUTBOUND, Place, Received},
    proxies::{Proxies, Proxy},
    report::{Destination, Dns, ExplainReport, Hop, Party},
    request::ParsedRequest,
    sources::Sources,
};

/// Address that stands for one outside the mesh, of a network for documentation (RFC 5737).
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
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
    Outside,
}

/// Content of a connection.
struct Payload {
    /// The client itself sends TLS: SNI.
    tls: Option<String>,
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

/// Result of a request that is not forwarded further.
struct JourneyEnd {
    served: bool,
    status: Option<u16>,
    result: String,
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
        head: request.head.as_ref().map(RequestHead::copy),
    };
    let end = match start {
        Start::Pod(pod) => follower.follow_pod(pod, request, &payload, &mut report),
        Start::Outside => follower.follow_outside(request, &payload, &mut report),
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
            Start::Outside => Party {
                workload: "outside".to_owned(),
                pod: String::new(),
                address: OUTSIDE.to_string(),
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
        if !pod.intercepts_outbound(ip, request.port) {
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
        let explained = self.explain(&proxy, OUTBOUND, &arriving);
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
        request: &ParsedRequest,
        payload: &Payload,
        report: &mut ExplainReport,
    ) -> Option<JourneyEnd> {
        let entrance = self.proxies.mesh.gateway(request.port).or_else(|| {
            let pod = self.proxies.mesh.pods.iter().find(|pod| pod.gateway)?;
            Some((pod, request.port))
        });
        let Some((pod, port)) = entrance else {
            let result =
                "the configuration has no gateway: clients outside the mesh reach none of its workloads";
            return Some(JourneyEnd { served: false, status: None, result: result.to_owned() });
        };
        let source = SocketAddr::new(OUTSIDE.into(), CLIENT_PORT);
        let destination = SocketAddr::new(pod.address.into(), port);
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

    fn explain(&self, proxy: &Proxy, entry: &str, arriving: &IncomingConnection<'_>) -> Explanation {
        let own: Vec<String> = vec!["h2".to_owned(), "http/1.1".to_owned()];
        let payload = arriving.payload;
        let tls = match (arriving.tls, &payload.tls) {
            (Some(tls), _) => Some(ClientHello {
                server_name: &tls.server_name,
                alpn: &tls.alpn,
                principal: arriving.principal.as_deref(),
            }),
            (None, Some(name)) => Some(ClientHello { server_name: name, alpn: &own, principal: None }),
            (None, None) => None,
        };
        let IncomingConnection { source, destination, .. } = *arriving;
        // Inside of TLS between proxies, a client's own TLS hides the request.
        let head = payload.head.as_ref().filter(|_| payload.tls.is_none() || arriving.tls.is_none());
        proxy.configuration.explain(entry, &Connection { source, destination, tls }, head)
    }

    fn hop(&self, place: &Place<'_>, explained: &Explanation, arriving: &IncomingConnection<'_>) -> Hop {
        let received = Received {
            destination: arriving.destination,
            tls: arriving.tls,
            client_tls: arriving.payload.tls.is_some(),
            principal: arriving.principal.as_deref(),
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
                (Some(head), "http") => Payload { tls: None, head: Some(head.copy()) },
                _ => Payload {
                    tls: from.payload.tls.clone().filter(|_| !explained.terminates_tls),
                    head: from.payload.head.as_ref().map(RequestHead::copy),
                },
            };
            found.extend(self.of_target(pod, target, &payload, from.hops + 1));
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
        let all: usize = groups.iter().map(|(_, count)| count).sum();
        let source = SocketAddr::new(pod.address.into(), CLIENT_PORT);
        let followed = groups.iter().take(MAX_WORKLOADS).map(|(endpoint, count)| {
            let part = share * ratio(*count, all);
            let Ok(address) = endpoint.address.parse() else {
                let end = outside(&endpoint.address);
                return destination(&target.cluster, part, endpoint.address.clone(), *count, payload, end);
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
            self.arrive(&arriving, &target.cluster, part, *count)
        });
        followed.collect()
    }

    /// Returns an endpoint for each workload among the candidates, with the number of its endpoints.
    fn groups<'e>(&self, endpoints: &'e [EndpointReport]) -> Vec<(&'e EndpointReport, usize)> {
        let mut groups: Vec<(String, &EndpointReport, usize)> = Vec::new();
        for endpoint in endpoints.iter().filter(|endpoint| endpoint.is_candidate) {
            let address = endpoint.address.parse::<SocketAddr>().ok();
            let pod = address.and_then(|address| self.proxies.mesh.pod_at(address.ip()));
            let key = match (pod, address) {
                (Some(pod), Some(address)) => format!("{} {}", pod.owner, address.port()),
                _ => endpoint.address.clone(),
            };
            match groups.iter_mut().find(|(known, ..)| *known == key) {
                Some((.., count)) => *count += 1,
                None => groups.push((key, endpoint, 1)),
            }
        }
        groups.into_iter().map(|(_, endpoint, count)| (endpoint, count)).collect()
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
            false => INBOUND.to_owned(),
            true => match proxy.configuration.listener_at(address) {
                Some(listener) => listener,
                None => {
                    let reason =
                        format!("the gateway {} has no listener for port {}", party.workload, address.port());
                    return Destination { to: Some(party), ..place(refused(&reason)) };
                }
            },
        };
        let explained = self.explain(&proxy, &entry, arriving);
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

fn outside(address: &str) -> JourneyEnd {
    JourneyEnd {
        served: true,
        status: None,
        result: format!("{address} is outside the mesh, where the request goes"),
    }
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

/// Returns the result for all destinations.
fn summary(destinations: &[Destination]) -> JourneyEnd {
    let refused: Vec<&Destination> = destinations.iter().filter(|to| !to.served).collect();
    let first = refused.first().or(destinations.first().as_ref().map(|to| to as _)).copied();
    let Some(first) = first else {
        return JourneyEnd { served: false, status: None, result: "the request reaches nothing".to_owned() };
    };
    let share: f64 = refused.iter().map(|to| to.share).sum();
    let all: f64 = destinations.iter().map(|to| to.share).sum();
    let is_same = destinations.iter().all(|to| to.status == first.status && to.served == first.served);
    let result = match (refused.is_empty(), destinations.len()) {
        (_, 1) => first.result.clone(),
        (true, number) => format!("one of {number} destinations receives it"),
        (false, _) => {
            let percent = 100.0 * share / all.max(f64::MIN_POSITIVE);
            format!("refused for {} % of the requests: {}", round(percent), first.result)
        }
    };
    JourneyEnd { served: refused.is_empty(), status: first.status.filter(|_| is_same), result }
}

/// Rounds to one decimal.
fn round(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

fn ratio(part: usize, all: usize) -> f64 {
    let number = |value: usize| f64::from(u32::try_from(value).unwrap_or(u32::MAX));
    number(part) / number(all.max(1))
}
