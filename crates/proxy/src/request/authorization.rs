//! External authorization: a service decides about a request, by gRPC or by an HTTP request like the client's.
//!
//! Its response becomes an [`AuthorizationVerdict`], which the filter applies. Source:
//! `envoy.service.auth.v3`, and Envoy's `ext_authz` filter for the attributes that are sent and the response
//! fields that are honoured.

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
    request::{context::ResponseField, hop},
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
        route::AppendAction,
        text::TextMatch,
    },
    error::{Error, Kind},
    matching,
};

#[cfg(test)]
mod tests;

/// Path of the gRPC method.
const CHECK: &str = "/envoy.service.auth.v3.Authorization/Check";

/// Fields of the request that an HTTP service gets even if `allowed_headers` does not list them.
const ALWAYS_SENT: [&str; 1] = ["authorization"];

/// Fields of a denial that the client always gets.
const ALWAYS_FORWARDED: [&str; 2] = ["www-authenticate", "location"];

/// Fields that are copied neither to nor from an HTTP service: they concern one connection, or this proxy sets them.
const CONNECTION_FIELDS: [&str; 7] = [
    "connection",
    "content-length",
    "date",
    "keep-alive",
    "server",
    "transfer-encoding",
    "x-envoy-upstream-service-time",
];

/// The request to decide about.
pub(crate) struct AuthorizationRequest<'a> {
    pub(crate) head: &'a RequestHead,
    pub(crate) origin: &'a Origin,
    /// The start of the body, up to the configured limit, and whether there is more of it. `None` without a body.
    pub(crate) body: Option<(&'a [u8], bool)>,
    /// Bytes of the body that have arrived so far.
    pub(crate) received: u64,
    /// Entries that the route adds (`context_extensions`).
    pub(crate) extensions: &'a [(Box<str>, Box<str>)],
    pub(crate) start: SystemTime,
}

/// A header's name and value.
type HeaderField = (Box<str>, Box<[u8]>);

/// The service's decision.
#[derive(Debug, PartialEq)]
pub(crate) enum AuthorizationVerdict {
    Allow(HeaderChanges),
    Deny { status: u16, headers: Vec<HeaderField>, body: Vec<u8> },
}

/// Changes of the request and of its response that come with an allowing decision.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct HeaderChanges {
    /// Fields that replace those of the request.
    pub(crate) set: Vec<HeaderField>,
    /// Values to append to fields that the request has.
    pub(crate) append: Vec<HeaderField>,
    /// Names of fields to remove.
    pub(crate) remove: Vec<Box<str>>,
    /// Fields to add to the response.
    pub(crate) response: Vec<ResponseField>,
    /// Dynamic metadata for later filters.
    pub(crate) metadata: Map<String, Value>,
}

impl AuthorizationVerdict {
    /// Returns whether the request continues with changes.
    pub(crate) fn changes_request(&self) -> bool {
        matches!(self, Self::Allow(changes) if changes.change_request())
    }
}

impl HeaderChanges {
    /// Returns whether these changes concern the request.
    pub(crate) fn change_request(&self) -> bool {
        !(self.set.is_empty() && self.append.is_empty() && self.remove.is_empty())
    }

    /// Applies the changes to the request's head.
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

/// Asks the service about a request.
///
/// # Errors
///
/// The service cannot be reached, or its response is no decision.
pub(crate) async fn check_request(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    config: &ExternalAuthorization,
    request: &AuthorizationRequest<'_>,
) -> Result<AuthorizationVerdict, Error> {
    // The call to an HTTP service has the client's method; CONNECT would ask the service to open a tunnel.
    if matches!(config.service, AuthorizationService::Http(_)) && request.head.method() == "CONNECT" {
        return Ok(AuthorizationVerdict::Deny { status: 403, headers: Vec::new(), body: Vec::new() });
    }
    let (head, content) = match &config.service {
        AuthorizationService::Grpc(metadata) => {
            grpc_request(config, metadata, request, worker.shared.dialer.principal().as_deref())
        }
        AuthorizationService::Http(http) => {
            let content = request.body.map_or(&b""[..], |(content, _)| content);
            (http_request(config, http, request), content.to_vec())
        }
    };
    let answer =
        call::send_request(worker, snapshot, &config.cluster, &head, &content, config.timeout).await?;
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

/// Asks the service about a connection. Returns whether it allows the connection.
///
/// # Errors
///
/// The service cannot be reached, or its response is no decision.
pub(crate) async fn check_connection(
    worker: &Rc<Worker>,
    snapshot: &Snapshot,
    config: &ExternalAuthorization,
    origin: &Origin,
) -> Result<bool, Error> {
    let principal = worker.shared.dialer.principal();
    let request =
        CheckRequest { attributes: Some(connection_attributes(config, origin, principal.as_deref())) };
    let (head, content) = (call::grpc_head(CHECK, &config.authority), call::grpc_frame(&request.to_vec()));
    let answer =
        call::send_request(worker, snapshot, &config.cluster, &head, &content, config.timeout).await?;
    let response = CheckResponse::from_slice(call::grpc_message(&answer)?)
        .map_err(|error| Error::caused(Kind::UpstreamProtocol, error))?;
    Ok(matches!(grpc_decision(response), AuthorizationVerdict::Allow(_)))
}

/// Returns the attributes of a connection: its two ends and its TLS session.
fn connection_attributes(
    config: &ExternalAuthorization,
    origin: &Origin,
    principal: Option<&str>,
) -> AttributeContext {
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
    request: &AuthorizationRequest<'_>,
    principal: Option<&str>,
) -> (RequestHead, Vec<u8>) {
    let mut head = call::grpc_head(CHECK, &config.authority);
    for (name, value) in metadata {
        head.append(name, value.as_bytes());
    }
    let since = request.start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let time =
        Timestamp { seconds: since.as_secs().cast_signed(), nanos: since.subsec_nanos().cast_signed() };
    let extensions = request.extensions.iter();
    let attributes = AttributeContext {
        request: Some(Request { time: Some(time), http: Some(http_attributes(config, request)) }),
        context_extensions: extensions.map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        ..connection_attributes(config, request.origin, principal)
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

fn http_attributes(config: &ExternalAuthorization, request: &AuthorizationRequest<'_>) -> HttpRequest {
    let head = request.head;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut http = HttpRequest {
        id: head.header("x-request-id").map(text).unwrap_or_default(),
        method: head.method().to_owned(),
        path: head.path().to_owned(),
        host: head.authority().to_owned(),
        scheme: head.scheme().to_owned(),
        size: request.received.cast_signed(),
        protocol: match head.version {
            Version::Http10 => "HTTP/1.0",
            Version::Http11 => "HTTP/1.1",
            Version::Http2 => "HTTP/2",
        }
        .to_owned(),
        ..HttpRequest::default()
    };
    let mut add = |name: &str, value: &[u8]| {
        if is_sent(config, name) {
            let value = text(value);
            match http.headers.entry(name.to_owned()) {
                Entry::Occupied(mut known) => known.get_mut().extend([",", &value]),
                Entry::Vacant(place) => _ = place.insert(value),
            }
        }
    };
    for name in [":authority", ":method", ":path", ":scheme"] {
        add(name, head.pseudo_header(name).unwrap_or_default().as_bytes());
    }
    for (name, value) in head.iter() {
        add(&String::from_utf8_lossy(name), value);
    }
    if let (Some(Body { raw, .. }), Some((content, partial))) = (config.body, request.body) {
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

fn is_sent(config: &ExternalAuthorization, name: &str) -> bool {
    config.allowed_headers.as_deref().is_none_or(|allowed| any(allowed, name))
        && !any(&config.disallowed_headers, name)
}

fn http_request(
    config: &ExternalAuthorization,
    http: &Http,
    request: &AuthorizationRequest<'_>,
) -> RequestHead {
    let head = request.head;
    let mut check = RequestHead::build(
        head.method(),
        &format!("{}{}", http.path_prefix, head.path()),
        head.authority(),
        &[],
    );
    check.version = Version::Http11;
    for (name, value) in head.iter() {
        let name = String::from_utf8_lossy(name);
        let wanted = config.allowed_headers.as_deref().is_some_and(|allowed| any(allowed, &name))
            || ALWAYS_SENT.contains(&&*name);
        if wanted && !any(&config.disallowed_headers, &name) && !CONNECTION_FIELDS.contains(&&*name) {
            // Values of a repeated field are joined.
            let joined = check.header(&name).map(|before| [before, value].join(&b','));
            check.set(&name, joined.as_deref().unwrap_or(value));
        }
    }
    if let Some((_, partial)) = request.body {
        check.set("x-envoy-auth-partial-body", partial.to_string().as_bytes());
    }
    for (name, value) in &http.add {
        check.set(name, value.as_bytes());
    }
    check
}

fn http_decision(http: &Http, head: &ResponseHead, content: Vec<u8>) -> Result<AuthorizationVerdict, Error> {
    let fields = |wanted: &dyn Fn(&str) -> bool| -> Vec<HeaderField> {
        let all = head.iter().map(|(name, value)| (String::from_utf8_lossy(name), value));
        let kept = all.filter(|(name, _)| !CONNECTION_FIELDS.contains(&&**name) && wanted(name));
        kept.map(|(name, value)| (Box::from(&*name), Box::from(value))).collect()
    };
    match head.status() {
        200 => {
            let removed = head.header_values("x-envoy-auth-headers-to-remove");
            let removed = removed.flat_map(|value| value.split(|byte| *byte == b','));
            Ok(AuthorizationVerdict::Allow(HeaderChanges {
                set: fields(&|name| any(&http.upstream, name)),
                append: fields(&|name| any(&http.upstream_appended, name)),
                remove: removed
                    .filter_map(|name| std::str::from_utf8(name).ok())
                    .map(|name| name.trim().to_ascii_lowercase().into())
                    .collect(),
                response: fields(&|name| any(&http.client_on_success, name))
                    .into_iter()
                    .map(|(name, value)| ResponseField { name, value, action: AppendAction::Append })
                    .collect(),
                metadata: Map::new(),
            }))
        }
        status @ (..200 | 500..) => {
            Err(Error::caused(Kind::UpstreamProtocol, format!("the service answered with status {status}")))
        }
        status => Ok(AuthorizationVerdict::Deny {
            status,
            headers: fields(&|name| {
                http.client.is_empty() || any(&http.client, name) || ALWAYS_FORWARDED.contains(&name)
            }),
            body: content,
        }),
    }
}

#[expect(deprecated, reason = "services still set `append` and `dynamic_metadata`")]
fn grpc_decision(response: CheckResponse) -> AuthorizationVerdict {
    let code = response.status.map_or(0, |status| status.code);
    let field = |option: HeaderValueOption| {
        let action = match (option.append.map(|append| append.value), option.append_action()) {
            (Some(true), _) | (None, HeaderAppendAction::AppendIfExistsOrAdd) => AppendAction::Append,
            (Some(false), _) | (None, HeaderAppendAction::OverwriteIfExistsOrAdd) => AppendAction::Overwrite,
            (None, HeaderAppendAction::AddIfAbsent) => AppendAction::AddIfAbsent,
            (None, HeaderAppendAction::OverwriteIfExists) => AppendAction::OverwriteIfExists,
        };
        // As in Envoy, the action has no effect on requests.
        let is_appended = option.append.is_some_and(|append| append.value);
        let header = option.header?;
        let is_name = !header.key.is_empty() && header.key.bytes().all(parse::is_token);
        if !is_name && !header.key.starts_with(':') {
            return None;
        }
        let name = header.key.to_ascii_lowercase();
        if hop::OWN_FIELDS.contains(&&*name) {
            return None;
        }
        let value = if header.value.is_empty() { header.raw_value } else { header.value.into_bytes() };
        // Control characters are dropped: a line feed would begin another field.
        let value = value.into_iter().filter(|byte| !byte.is_ascii_control() || *byte == b'\t').collect();
        Some((is_appended, ResponseField { name: name.into_boxed_str(), value, action }))
    };
    let fields = |options: Vec<HeaderValueOption>| options.into_iter().filter_map(field);
    let mut metadata = response.dynamic_metadata.map(json).unwrap_or_default();
    match response.http_response {
        Some(HttpResponse::OkResponse(ok)) if code == 0 => {
            let mut changes = HeaderChanges::default();
            for (is_appended, ResponseField { name, value, .. }) in fields(ok.headers) {
                if is_appended { &mut changes.append } else { &mut changes.set }.push((name, value));
            }
            changes.remove =
                ok.headers_to_remove.iter().map(|name| name.to_ascii_lowercase().into()).collect();
            changes.response = fields(ok.response_headers_to_add).map(|(_, field)| field).collect();
            // The order of the actions in Envoy.
            changes.response.sort_by_key(|field| match field.action {
                AppendAction::Append => 0,
                AppendAction::Overwrite => 1,
                AppendAction::AddIfAbsent => 2,
                AppendAction::OverwriteIfExists => 3,
            });
            if let Some(older) = ok.dynamic_metadata {
                metadata.extend(json(older));
            }
            changes.metadata = metadata;
            AuthorizationVerdict::Allow(changes)
        }
        _ if code == 0 => AuthorizationVerdict::Allow(HeaderChanges { metadata, ..HeaderChanges::default() }),
        Some(HttpResponse::DeniedResponse(denied)) => AuthorizationVerdict::Deny {
            status: denied
                .status
                .and_then(|status| u16::try_from(status.code).ok())
                .filter(|code| (200..600).contains(code))
                .unwrap_or(403),
            headers: fields(denied.headers).map(|(_, field)| (field.name, field.value)).collect(),
            body: denied.body.into_bytes(),
        },
        _ => AuthorizationVerdict::Deny { status: 403, headers: Vec::new(), body: Vec::new() },
    }
}

/// Returns a `google.protobuf.Struct` as a JSON object.
pub(crate) fn json(proto: Struct) -> Map<String, Value> {
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
