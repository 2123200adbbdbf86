//! Ways for the fuzz targets to what is the crate's own. Built with the feature `fuzzing` alone, which nothing
//! that is shipped turns on.

use std::task::{Context, Waker};

use skysail_xds::envoy::pb::envoy::config::core::v3::Node;

use crate::{
    http::{
        buffer::Buffer,
        head::{Headers, RequestHead, ResponseHead},
        http1::{
            Framing,
            write::{self, Persistence},
        },
        http2::{self, Decoder, Encoder, Http2Options, Session},
        proxy_protocol::{self, Ends, Version},
    },
    policy::config::http::Format,
    request::hop,
    translate::{self, TlsContexts, Translator},
    worker::inspect::{self, Findings, Look},
};

/// A request as it goes out to an upstream: head, content in these pieces, trailers.
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

/// An answer to `method` as it goes out to a client of HTTP/1.1.
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

/// What the listener filters make of a connection's first bytes: for TLS and for HTTP, `None` while more bytes
/// are needed, else a text that tells it all.
pub fn inspect(bytes: &[u8]) -> [Option<String>; 2] {
    let (mut tls, mut http) = (inspect::Tls::default(), inspect::Http::default());
    let mut findings = [Findings::default(), Findings::default()];
    let seen = [tls.look(bytes, false, &mut findings[0]), http.look(bytes, false, &mut findings[1])];
    [0, 1].map(|at| (seen[at] != Look::More).then(|| format!("{:?} {:?}", seen[at], findings[at])))
}

/// The same after a look at each beginning of them, up to the first verdict.
pub fn inspect_in_pieces(bytes: &[u8]) -> [Option<String>; 2] {
    let (mut tls, mut http) = (inspect::Tls::default(), inspect::Http::default());
    [
        first_verdict(bytes, |bytes, findings| tls.look(bytes, false, findings)),
        first_verdict(bytes, |bytes, findings| http.look(bytes, false, findings)),
    ]
}

fn first_verdict(bytes: &[u8], mut look: impl FnMut(&[u8], &mut Findings) -> Look) -> Option<String> {
    let mut findings = Findings::default();
    let mut looks = (0..=bytes.len()).map(|end| look(&bytes[..end], &mut findings));
    let seen = looks.find(|seen| *seen != Look::More)?;
    Some(format!("{seen:?} {findings:?}"))
}

/// A text with `%OPERATORS%`.
///
/// # Errors
/// What is wrong with it.
pub fn format(text: &str) -> Result<Format, String> {
    translate::format(text).map_err(|reject| reject.to_string())
}

/// Translates a resource; true if it was taken.
pub fn translate(kind: Resource, body: &[u8], strict: bool) -> bool {
    let tls = TlsContexts::default();
    let translator = Translator { tls: &tls, node: &Node::default(), strict };
    match kind {
        Resource::Cluster => translator.cluster(body).is_ok(),
        Resource::Listener => translator.listener(body).is_ok(),
        Resource::Routes => translator.routes(body).is_ok(),
        Resource::Bootstrap => crate::translate::bootstrap::parse(body.to_vec().into(), false).is_ok(),
        Resource::Endpoints => {
            // One named `a` whose endpoints come by discovery.
            let cluster = b"\x0a\x01a\x10\x03\x1a\x04\x0a\x02\x1a\x00";
            translator.cluster(cluster).is_ok_and(|cluster| translator.endpoints(body, &cluster).is_ok())
        }
    }
}

/// What to translate.
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

/// Header blocks of one connection, each after two bytes that tell its length, up to the first that is none: their
/// fields, and what is read from them once they are written anew.
pub fn hpack(data: &[u8]) -> [Fields; 2] {
    let (mut decoder, mut encoder, mut next) = (Decoder::new(), Encoder::new(), Decoder::new());
    let (mut all, mut again) = (Vec::new(), Vec::new());
    let mut rest = data;
    while let Some((length, after)) = rest.split_first_chunk() {
        let (block, after) = after.split_at(after.len().min(usize::from(u16::from_be_bytes(*length))));
        let mut out = Vec::new();
        encoder.begin(&mut out);
        let read = decoder.decode(block, |name, value| {
            all.push((name.to_vec(), value.to_vec()));
            encoder.field(&mut out, name, value);
        });
        let reread = next.decode(&out, |name, value| again.push((name.to_vec(), value.to_vec())));
        if reread.is_err() || read.is_err() {
            break;
        }
        rest = after;
    }
    [all, again]
}

/// Names and values.
pub type Fields = Vec<(Vec<u8>, Vec<u8>)>;

/// What a peer's bytes make of a connection of HTTP/2, at either end, if they come in pieces of this size: how it
/// went, what the connection has to say, and the requests.
pub fn http2(server: bool, data: &[u8], piece: usize) -> (bool, Vec<u8>, String) {
    let options = Http2Options { allow_connect: true, ..Http2Options::new(4) };
    let limits = http2::Limits { head: http2::Bounds { size: 4096, fields: 20 }, options };
    let role = if server { http2::Role::Server } else { http2::Role::Client };
    let mut session = Session::new(role, limits);
    let mut input = Buffer::default();
    let mut went = true;
    for bytes in data.chunks(piece.max(1)) {
        input.extend(bytes);
        if let Err(reason) = session.feed(&mut input) {
            session.fail(reason);
            went = false;
            break;
        }
    }
    let mut requests = String::new();
    let cx = Context::from_waker(Waker::noop());
    while let Some(request) = session.accept() {
        let content = session.poll_piece(&cx, request.stream);
        requests += &format!("{:?} {:?} {content:?}\n", request.stream, request.head);
        session.forget(request.stream);
    }
    (went, session.out.bytes().to_vec(), requests)
}

/// What a connection's first bytes say by the PROXY protocol: `None` while more are needed, else whether it is a header,
/// with how many bytes it has and whom it names.
pub fn proxy_header(bytes: &[u8]) -> Option<Option<(usize, Option<Ends>)>> {
    match proxy_protocol::look(bytes) {
        proxy_protocol::Look::More => None,
        proxy_protocol::Look::Header(_, length, ends) => Some(Some((length, ends))),
        proxy_protocol::Look::Absent | proxy_protocol::Look::Broken => Some(None),
    }
}

/// A header of the PROXY protocol.
pub fn write_proxy_header(version: Version, ends: Option<Ends>) -> Vec<u8> {
    proxy_protocol::write(version, ends)
}
