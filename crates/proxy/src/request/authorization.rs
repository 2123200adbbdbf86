//! External authorization: another service is asked about a request, by gRPC or by a request like the client's.
//!
//! What it says comes back as a [`Decision`]; the filter acts on it. Source: `envoy.service.auth.v3`, and Envoy's
//! `ext_authz` filter for what is told and heeded.

use std::{collections::hash_map::Entry, rc::Rc, time::SystemTime};

use serde_json::{Map, Value};
use skysail_proto::Codec as _;
use skysail_xds::envoy::pb::{
    envoy::{
        config::core::v3::{
            Address, HeaderValueOption, Metadata, SocketAddress, address,
            header_value_option::HeaderAppendAction, socket_address::PortSpecifier,
        },
        service::auth::v3::{
            AttributeContext, CheckRequest, CheckResponse,
            attribute_context::{HttpRequest, Peer as PeerProto, Request, TlsSession},
            check_response::HttpResponse,
        },
    },
    google::protobuf::{Struct, Timestamp, value::Kind as ValueKind},
};

use crate::{
    call,
    worker::{Worker, downstream::Origin},
};
use skysail_http::{
    head::{RequestHead, ResponseHead, Version},
    http1::parse,
};
use skysail_policy::{
    config::{
        Snapshot,
        authorization::{AuthorizationService, Body, ExternalAuthorization, Http},
        text::TextMatch,
    },
    error::{Error, Kind},
    matching,
};

#[cfg(test)]
mod tests;

/// The method that decides.
const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";

/// What an HTTP service gets of a request's headers whatever the configuration, with the request's line.
const ALWAYS_TOLD: [&str; 1] = ["authorization"];

/// What a client gets of a refusal whatever the configuration.
const ALWAYS_PASSED: [&str; 2] = ["www-authenticate", "location"];

/// Headers of an HTTP service's answer that concern its connection alone, or that the answer gets anew.
const OWN: [&str; 7] = [
    "connection",
    "content-length",
    "date",
    "keep-alive",
    "server",
    "transfer-encoding",
    "x-envoy-upstream-service-time",
];

/// What is asked.
pub(crate) struct Question<'a> {
    pub(crate) head: &'a RequestHead,
    pub(crate) origin: &'a Origin,
    /// As much of the body as is told, if there is one, and whether there is more of it.
    pub(crate) body: Option<(&'a [u8], bool)>,
    /// How much of the body has come so far.
    pub(crate) received: u64,
    /// What the route adds (`context_extensions`).
    pub(crate) extensions: &'a [(Box<str>, Box<str>)],
    pub(crate) start: SystemTime,
}

/// A header's name and value.
type HeaderField = (Box<str>, Box<[u8]>);

/// What becomes of the request.
#[derive(Debug, PartialEq)]
pub(crate) enum Decision {
    Allow(HeaderChanges),
    Deny { status: u16, headers: Vec<HeaderField>, body: Vec<u8> },
}

/// What consent changes.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct HeaderChanges {
    /// Instead of the request's headers of these names.
    pub(crate) set: Vec<HeaderField>,
    /// Added to the values of headers that are there.
    pub(crate) append: Vec<HeaderField>,
    pub(crate) remove: Vec<Box<str>>,
    /// For the answer.
    pub(crate) answer: Vec<HeaderField>,
    /// For filters that follow.
    pub(crate) metadata: Map<String, Value>,
}

impl Decision {
    /// Whether the request, if it goes on, is another than before.
    pub(crate) fn touches_request(&self) -> bool {
        matches!(self, Self::Allow(changes) if changes.touch_request())
    }
}

impl HeaderChanges {
    /// Whether the request is another than before.
    pub(crate) fn touch_request(&self) -> bool {
        !(self.set.is_empty() && self.append.is_empty() && self.remove.is_empty())
    }

    /// Makes the changes.
    pub(crate) fn apply(&self, head: &mut RequestHead) {
        for (name, value) in &self.set {
            if &**name == "host" {
                if let Some(authority) = skysail_http::head::as_authority(value) {
                    head.set_authority(authority);
                }
            } else if !name.starts_with(':') {
                head.set(name, value);
            }
        }
        for (name, value) in &self.append {
            if let Some(joined) = head.header(name).map(|before| [before, value].join(&b',')) {
                head.set(name, &joined);
            }
        }
        for name in self.remove.iter().filter(|name| !name.starts_with(':') && &***name != "host") {
            head.remove(name);
        }
    }
}

/// Asks.
///
/// # Errors
///
/// The service cannot be reached, or what it says is no decision.
pub(crate) async fn ask(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    config: &ExternalAuthorization,
    question: &Question<'_>,
) -> Result<Decision, Error> {
    // A service of HTTP would take it for a tunnel.
    if matches!(config.service, AuthorizationService::Http(_)) && question.head.method() == "CONNECT" {
        return Ok(Decision::Deny { status: 403, headers: Vec::new(), body: Vec::new() });
    }
    let (head, content) = match &config.service {
        AuthorizationService::Grpc(metadata) => {
            grpc_request(config, metadata, question, worker.shared.dialer.principal().as_deref())
        }
        AuthorizationService::Http(http) => {
            let content = question.body.map_or(&b""[..], |(content, _)| content);
            (http_request(config, http, question), content.to_vec())
        }
    };
    let answer = call::ask(worker, snapshot, &config.cluster, &head, &content, config.timeout).await?;
    match &config.service {
        AuthorizationService::Grpc(_) => {
            let message = call::grpc_message(&answer)?;
            let response = CheckResponse::from_slice(message)
                .map_err(|error| Error::caused(Kind::UpstreamProtocol, error))?;
            Ok(grpc_decision(response))
        }
        AuthorizationService::Http(http) => http_decision(http, &answer.head, answer.content),
    }
}

/// Asks about a connection.
///
/// # Errors
///
/// The service cannot be reached, or what it says is no decision.
pub(crate) async fn ask_about_connection(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    config: &ExternalAuthorization,
    origin: &Origin,
) -> Result<bool, Error> {
    let principal = worker.shared.dialer.principal();
    let request = CheckRequest { attributes: Some(parties(config, origin, principal.as_deref())) };
    let (head, content) = (call::grpc_head(CHECK, &config.authority), call::grpc_frame(&request.to_vec()));
    let answer = call::ask(worker, snapshot, &config.cluster, &head, &content, config.timeout).await?;
    let response = CheckResponse::from_slice(call::grpc_message(&answer)?)
        .map_err(|error| Error::caused(Kind::UpstreamProtocol, error))?;
    Ok(matches!(grpc_decision(response), Decision::Allow(_)))
}

/// Who asks whom.
fn parties(config: &ExternalAuthorization, origin: &Origin, principal: Option<&str>) -> AttributeContext {
    let names = origin.peer.names();
    let of_client = names.and_then(|names| names.uris.first().or(names.dns.first())).cloned();
    let certificate = if config.include_certificate { origin.peer.certificate_pem() } else { None };
    AttributeContext {
        source: Some(PeerProto {
            address: Some(address(origin.source)),
            principal: of_client.unwrap_or_default(),
            certificate: certificate.unwrap_or_default(),
            ..PeerProto::default()
        }),
        destination: Some(PeerProto {
            address: Some(address(origin.destination)),
            principal: principal.unwrap_or_default().to_owned(),
            ..PeerProto::default()
        }),
        metadata_context: Some(Metadata::default()),
        tls_session: config
            .include_tls_session
            .then(|| TlsSession { sni: origin.server_name().unwrap_or_default().to_owned() }),
        ..AttributeContext::default()
    }
}

fn grpc_request(
    config: &ExternalAuthorization,
    metadata: &[(Box<str>, Box<str>)],
    question: &Question<'_>,
    principal: Option<&str>,
) -> (RequestHead, Vec<u8>) {
    let mut head = call::grpc_head(CHECK, &config.authority);
    for (name, value) in metadata {
        head.append(name, value.as_bytes());
    }
    let since = question.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let time =
        Timestamp { seconds: since.as_secs().cast_signed(), nanos: since.subsec_nanos().cast_signed() };
    let extensions = question.extensions.iter();
    let attributes = AttributeContext {
        request: Some(Request { time: Some(time), http: Some(http_attributes(config, question)) }),
        context_extensions: extensions.map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        ..parties(config, question.origin, principal)
    };
    let request = CheckRequest { attributes: Some(attributes) };
    (head, call::grpc_frame(&request.to_vec()))
}

fn address(of: std::net::SocketAddr) -> Address {
    Address {
        address: Some(address::Address::SocketAddress(SocketAddress {
            address: of.ip().to_string(),
            port_specifier: Some(PortSpecifier::PortValue(of.port().into())),
            ..SocketAddress::default()
        })),
    }
}

fn http_attributes(config: &ExternalAuthorization, question: &Question<'_>) -> HttpRequest {
    let head = question.head;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut http = HttpRequest {
        id: head.header("x-request-id").map(text).unwrap_or_default(),
        method: head.method().to_owned(),
        path: head.path().to_owned(),
        host: head.authority().to_owned(),
        scheme: head.scheme().to_owned(),
        size: question.received.cast_signed(),
        protocol: match head.version {
            Version::Http10 => "HTTP/1.0",
            Version::Http11 => "HTTP/1.1",
            Version::Http2 => "HTTP/2",
        }
        .to_owned(),
        ..HttpRequest::default()
    };
    let mut tell = |name: &str, value: &[u8]| {
        if is_told(config, name) {
            let value = text(value);
            match http.headers.entry(name.to_owned()) {
                Entry::Occupied(mut known) => known.get_mut().extend([",", &value]),
                Entry::Vacant(place) => _ = place.insert(value),
            }
        }
    };
    for name in [":authority", ":method", ":path", ":scheme"] {
        tell(name, head.apart(name).unwrap_or_default().as_bytes());
    }
    for (name, value) in head.iter() {
        tell(&String::from_utf8_lossy(name), value);
    }
    if let (Some(Body { raw, .. }), Some((content, partial))) = (config.body, question.body) {
        http.headers.insert("x-envoy-auth-partial-body".to_owned(), partial.to_string());
        if raw {
            http.raw_body = content.to_vec();
        } else {
            http.body = text(content);
        }
    }
    http
}

fn any(tests: &[TextMatch], name: &str) -> bool {
    tests.iter().any(|test| matching::text(test, name.as_bytes()))
}

fn is_told(config: &ExternalAuthorization, name: &str) -> bool {
    config.allowed_headers.as_deref().is_none_or(|allowed| any(allowed, name))
        && !any(&config.disallowed_headers, name)
}

fn http_request(config: &ExternalAuthorization, http: &Http, question: &Question<'_>) -> RequestHead {
    let head = question.head;
    let mut asked = RequestHead::build(
        head.method(),
        &format!("{}{}", http.path_prefix, head.path()),
        head.authority(),
        &[],
    );
    asked.version = Version::Http11;
    for (name, value) in head.iter() {
        let name = String::from_utf8_lossy(name);
        let wanted = config.allowed_headers.as_deref().is_some_and(|allowed| any(allowed, &name))
            || ALWAYS_TOLD.contains(&&*name);
        if wanted && !any(&config.disallowed_headers, &name) && !OWN.contains(&&*name) {
            // What comes several times is told joined.
            let joined = asked.header(&name).map(|before| [before, value].join(&b','));
            asked.set(&name, joined.as_deref().unwrap_or(value));
        }
    }
    if let Some((_, partial)) = question.body {
        asked.set("x-envoy-auth-partial-body", partial.to_string().as_bytes());
    }
    for (name, value) in &http.add {
        asked.set(name, value.as_bytes());
    }
    asked
}

fn http_decision(http: &Http, head: &ResponseHead, content: Vec<u8>) -> Result<Decision, Error> {
    let named = |wanted: &dyn Fn(&str) -> bool| -> Vec<HeaderField> {
        let fields = head.iter().map(|(name, value)| (String::from_utf8_lossy(name), value));
        let fields = fields.filter(|(name, _)| !OWN.contains(&&**name) && wanted(name));
        fields.map(|(name, value)| (Box::from(&*name), Box::from(value))).collect()
    };
    match head.status() {
        200 => {
            let removed = head.header_values("x-envoy-auth-headers-to-remove");
            let removed = removed.flat_map(|value| value.split(|byte| *byte == b','));
            Ok(Decision::Allow(HeaderChanges {
                set: named(&|name| any(&http.upstream, name)),
                append: named(&|name| any(&http.upstream_appended, name)),
                remove: removed
                    .filter_map(|name| std::str::from_utf8(name).ok())
                    .map(|name| name.trim().to_ascii_lowercase().into())
                    .collect(),
                answer: named(&|name| any(&http.client_on_success, name)),
                metadata: Map::new(),
            }))
        }
        status @ (..200 | 500..) => {
            Err(Error::caused(Kind::UpstreamProtocol, format!("the service answered {status}")))
        }
        status => Ok(Decision::Deny {
            status,
            headers: named(&|name| {
                http.client.is_empty() || any(&http.client, name) || ALWAYS_PASSED.contains(&name)
            }),
            body: content,
        }),
    }
}

#[expect(deprecated, reason = "services still say `append` and dynamic_metadata there")]
fn grpc_decision(response: CheckResponse) -> Decision {
    let code = response.status.map_or(0, |status| status.code);
    let field = |option: HeaderValueOption| {
        let appended = match option.append {
            Some(append) => append.value,
            None => option.append_action() == HeaderAppendAction::AddIfAbsent,
        };
        let header = option.header?;
        let is_name = !header.key.is_empty() && header.key.bytes().all(parse::is_token);
        if !is_name && !header.key.starts_with(':') {
            return None;
        }
        let value = if header.value.is_empty() { header.raw_value } else { header.value.into_bytes() };
        // What would end a line would begin another header.
        let value = value.into_iter().filter(|byte| !byte.is_ascii_control() || *byte == b'\t').collect();
        Some((appended, header.key.to_ascii_lowercase().into_boxed_str(), value))
    };
    let fields = |options: Vec<HeaderValueOption>| options.into_iter().filter_map(field);
    let mut metadata = response.dynamic_metadata.map(json).unwrap_or_default();
    match response.http_response {
        Some(HttpResponse::OkResponse(ok)) if code == 0 => {
            let mut changes = HeaderChanges::default();
            for (appended, name, value) in fields(ok.headers) {
                if appended { &mut changes.append } else { &mut changes.set }.push((name, value));
            }
            changes.remove =
                ok.headers_to_remove.iter().map(|name| name.to_ascii_lowercase().into()).collect();
            changes.answer =
                fields(ok.response_headers_to_add).map(|(_, name, value)| (name, value)).collect();
            if let Some(older) = ok.dynamic_metadata {
                metadata.extend(json(older));
            }
            changes.metadata = metadata;
            Decision::Allow(changes)
        }
        _ if code == 0 => Decision::Allow(HeaderChanges { metadata, ..HeaderChanges::default() }),
        Some(HttpResponse::DeniedResponse(denied)) => Decision::Deny {
            status: denied
                .status
                .and_then(|status| u16::try_from(status.code).ok())
                .filter(|code| (200..600).contains(code))
                .unwrap_or(403),
            headers: fields(denied.headers).map(|(_, name, value)| (name, value)).collect(),
            body: denied.body.into_bytes(),
        },
        _ => Decision::Deny { status: 403, headers: Vec::new(), body: Vec::new() },
    }
}

fn json(proto: Struct) -> Map<String, Value> {
    proto.fields.into_iter().map(|(key, value)| (key, json_value(value.kind))).collect()
}

fn json_value(kind: Option<ValueKind>) -> Value {
    match kind {
        Some(ValueKind::BoolValue(is)) => is.into(),
        Some(ValueKind::NumberValue(number)) => number.into(),
        Some(ValueKind::StringValue(text)) => text.into(),
        Some(ValueKind::StructValue(inner)) => json(inner).into(),
        Some(ValueKind::ListValue(list)) => {
            list.values.into_iter().map(|value| json_value(value.kind)).collect::<Vec<_>>().into()
        }
        Some(ValueKind::NullValue(_)) | None => Value::Null,
    }
}
