//! Entry points for the fuzz targets into private parts of the crate. Compiled only with the feature `fuzzing`,
//! which no shipped build enables.

use skysail_xds::envoy::pb::envoy::config::core::v3::Node;

use crate::{
    request::hop,
    translate::{self, TlsContexts, Translator},
    worker::inspect::{self, Findings, InspectionState},
};
use skysail_http::{
    buffer::Buffer,
    head::{Headers, RequestHead, ResponseHead},
    http1::{
        Framing,
        write::{self, Persistence},
    },
};
use skysail_policy::config::http::Format;

/// Encodes an HTTP/1.1 request to an upstream: head, the pieces of `content`, trailers.
pub fn request(
    head: &mut RequestHead,
    framing: Framing,
    content: &[Vec<u8>],
    trailers: Option<&Headers>,
) -> Vec<u8> {
    let mut out = Buffer::default();
    hop::remove_connection_fields(head, false);
    write::request(&mut out, head, framing, Persistence::Keep);
    body(out, framing, content, trailers)
}

/// Encodes an HTTP/1.1 response to a request with `method`.
pub fn response(
    head: &mut ResponseHead,
    framing: Framing,
    method: &str,
    content: &[Vec<u8>],
    trailers: Option<&Headers>,
) -> Vec<u8> {
    let mut out = Buffer::default();
    hop::remove_connection_fields(head, false);
    write::response(&mut out, head, framing, method, Persistence::Keep);
    body(out, framing, content, trailers)
}

fn body(mut out: Buffer, framing: Framing, content: &[Vec<u8>], trailers: Option<&Headers>) -> Vec<u8> {
    for piece in content {
        write::data(&mut out, framing, piece);
    }
    write::finish(&mut out, framing, trailers);
    out.bytes().to_vec()
}

/// Returns the verdicts of the TLS and HTTP listener filters on a connection's first bytes, as text. `None`
/// means that the filter needs more bytes.
pub fn inspect(bytes: &[u8]) -> [Option<String>; 2] {
    let (mut tls, mut http) = (inspect::TlsInspector::default(), inspect::HttpInspector::default());
    let mut findings = [Findings::default(), Findings::default()];
    let seen = [tls.inspect(bytes, false, &mut findings[0]), http.inspect(bytes, false, &mut findings[1])];
    [0, 1].map(|at| (seen[at] != InspectionState::More).then(|| format!("{:?} {:?}", seen[at], findings[at])))
}

/// Returns the first verdict of each listener filter while `bytes` arrive one at a time.
pub fn inspect_in_pieces(bytes: &[u8]) -> [Option<String>; 2] {
    let (mut tls, mut http) = (inspect::TlsInspector::default(), inspect::HttpInspector::default());
    [
        first_verdict(bytes, |bytes, findings| tls.inspect(bytes, false, findings)),
        first_verdict(bytes, |bytes, findings| http.inspect(bytes, false, findings)),
    ]
}

fn first_verdict(
    bytes: &[u8],
    mut inspect: impl FnMut(&[u8], &mut Findings) -> InspectionState,
) -> Option<String> {
    let mut findings = Findings::default();
    let mut states = (0..=bytes.len()).map(|end| inspect(&bytes[..end], &mut findings));
    let seen = states.find(|seen| *seen != InspectionState::More)?;
    Some(format!("{seen:?} {findings:?}"))
}

/// Parses a text with `%OPERATORS%`.
///
/// # Errors
/// The text is not a valid format; the string says why.
pub fn format(text: &str) -> Result<Format, String> {
    translate::format(text).map_err(|reject| reject.to_string())
}

/// Translates a resource; returns whether it was accepted.
pub fn translate(kind: Resource, body: &[u8], strict: bool) -> bool {
    let tls = TlsContexts::default();
    let translator = Translator { tls: &tls, node: &Node::default(), strict };
    match kind {
        Resource::Cluster => translator.cluster(body).is_ok(),
        Resource::Listener => translator.listener(body).is_ok(),
        Resource::Routes => translator.routes(body).is_ok(),
        Resource::Bootstrap => crate::translate::bootstrap::parse(body.to_vec().into(), false).is_ok(),
        Resource::Endpoints => {
            // A cluster named `a` of type EDS.
            let cluster = b"\x0a\x01a\x10\x03\x1a\x04\x0a\x02\x1a\x00";
            translator.cluster(cluster).is_ok_and(|cluster| translator.endpoints(body, &cluster).is_ok())
        }
    }
}

/// Kind of the resource to translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// `envoy.config.cluster.v3.Cluster`
    Cluster,
    /// `envoy.config.listener.v3.Listener`
    Listener,
    /// `envoy.config.route.v3.RouteConfiguration`
    Routes,
    /// `envoy.config.endpoint.v3.ClusterLoadAssignment`
    Endpoints,
    /// `envoy.config.bootstrap.v3.Bootstrap`
    Bootstrap,
}
