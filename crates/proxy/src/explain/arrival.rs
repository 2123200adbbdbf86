//! What a proxy finds in a connection and a request before it selects a filter chain and a route.

use std::rc::Rc;

use skysail_http::head::RequestHead;
use skysail_policy::{
    config::{HttpManager, listener::Transport},
    path::{self, Normalization},
    peer::{Certificate, Peer},
};

use super::{
    Connection,
    report::{CertificateVerdict, Outcome},
};
use crate::{request::hop, worker::inspect::Findings};

/// Status of the redirect to a normalized path.
const TEMPORARY_REDIRECT: u16 = 307;
/// Status of the response to a malformed request.
const BAD_REQUEST: u16 = 400;

/// Normalizes the head of a request. Returns the response if the settings refuse or redirect it.
pub(super) fn refusal(manager: &HttpManager, head: &mut RequestHead) -> Option<Outcome> {
    if hop::refuses_underscores(manager, head) {
        let reason = "the name of a header has an underscore".to_owned();
        return Some(Outcome::Responded(BAD_REQUEST, reason));
    }
    match path::normalize(manager, head) {
        Normalization::Continue => None,
        Normalization::Reject => {
            let reason = "the path has a fragment, an escaped slash, or is not valid".to_owned();
            Some(Outcome::Responded(BAD_REQUEST, reason))
        }
        Normalization::Redirect => {
            let reason = format!("redirect to the normalized path {}", path::location(head));
            Some(Outcome::Responded(TEMPORARY_REDIRECT, reason))
        }
    }
}

/// Returns what the listener filters find in the first bytes of a connection.
pub(super) fn findings(connection: &Connection<'_>, head: Option<&RequestHead>) -> Findings {
    let mut findings = Findings::default();
    if let Some(hello) = &connection.tls {
        findings.transport = Some(Transport::Tls);
        findings.server_name =
            (!hello.server_name.is_empty()).then(|| hello.server_name.to_ascii_lowercase().into());
        findings.protocols = hello.alpn.iter().map(|protocol| protocol.as_bytes().into()).collect();
    } else {
        findings.transport = Some(Transport::RawBuffer);
        let protocol = head.map(|head| if head.version.as_str() == "HTTP/2" { "h2c" } else { "http/1.1" });
        findings.protocols = protocol.into_iter().map(|protocol| protocol.as_bytes().into()).collect();
    }
    findings
}

/// Returns the peer of a connection, with its certificate if the proxy accepts that.
pub(super) fn peer(connection: &Connection<'_>, verdict: &CertificateVerdict) -> Peer {
    let Some(hello) = &connection.tls else { return Peer::plain() };
    let certificate = hello.certificate.filter(|_| verdict.is_presented());
    let certificate =
        certificate.map(|certificate| Rc::new(Certificate::new(&[], certificate.names().clone())));
    Peer::secured(certificate, None)
}
