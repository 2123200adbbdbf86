//! The path of a request: the name lookup and the sidecar of its client, and the result.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use skysail_http::head::RequestHead;
use skysail_model::Severity;
use skysail_sandbox::{Lookup, OfflinePod};

use super::{
    ends::{JourneyEnd, State, summary},
    gateway,
    hop::{OUTBOUND, Place},
    places::{CLIENT_PORT, Follower, IncomingConnection, Payload},
    proxies::Proxies,
    report::{Destination, Dns, ExplainReport, Party},
    request::ParsedRequest,
};

/// Address that stands for one outside the mesh, of a network for documentation (RFC 5737).
pub(super) const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
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

/// Follows a request.
pub(super) fn follow(proxies: &Proxies<'_>, start: &Start<'_>, request: &ParsedRequest) -> ExplainReport {
    let follower = Follower::new(proxies);
    let mut report = ExplainReport {
        from: follower.client(start),
        request: request.shown.clone(),
        errors: errors(proxies),
        dns: None,
        client: None,
        notes: Vec::new(),
        destinations: Vec::new(),
        served: false,
        state: State::Refused,
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
    report.notes.extend(follower.note());
    let JourneyEnd { state, status, result } = end.unwrap_or_else(|| summary(&report.destinations));
    (report.served, report.state, report.status, report.result) =
        (state == State::Served, state, status, result);
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
            Err(reason) => return Some(JourneyEnd::refused(reason)),
        };
        let destination = SocketAddr::new(address, request.port);
        let source = SocketAddr::new(pod.address.into(), CLIENT_PORT);
        let arriving = IncomingConnection::new(source, destination, payload);
        let IpAddr::V4(ip) = address else {
            let result = "IPv6 addresses are not explained: the mesh has IPv4 addresses only".to_owned();
            return Some(JourneyEnd::refused(result));
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
            return Some(JourneyEnd::refused(result));
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
            Err(reason) => return Some(JourneyEnd::refused(reason)),
        };
        report.notes.extend(Some(entrance.note).filter(|note| !note.is_empty()));
        let source = SocketAddr::new(address.into(), CLIENT_PORT);
        let destination = SocketAddr::new(entrance.pod.address.into(), entrance.port);
        let arriving = IncomingConnection::new(source, destination, payload);
        report.destinations = vec![self.arrive(&arriving, 1)];
        None
    }

    /// Returns the destination of a connection that stays in the pod of the client.
    fn within(&self, pod: &OfflinePod, address: SocketAddr, payload: &Payload) -> Destination {
        let party = self.party(pod);
        let result =
            format!("a program in the pod of {} receives it, if one listens on the port", party.workload);
        let head = payload.head.as_ref();
        let end = JourneyEnd::served(result);
        Destination { to: Some(party), ..Destination::new("", 1.0, (address.to_string(), 1), head, end) }
    }
}
