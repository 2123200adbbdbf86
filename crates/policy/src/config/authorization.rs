//! External authorization.
//!
//! Source: `envoy.extensions.filters.http.ext_authz.v3.ExtAuthz`.

use std::time::Duration;

use super::text::{MetadataMatch, TextMatch};

/// An external authorization service and the requests that it checks.
#[derive(Debug)]
pub struct ExternalAuthorization {
    /// Fingerprint of the filter's encoded configuration.
    pub fingerprint: u64,
    /// Protocol of the service.
    pub service: AuthorizationService,
    /// Cluster of the service.
    pub cluster: Box<str>,
    /// `:authority` of the check request.
    pub authority: Box<str>,
    /// Timeout of the check.
    pub timeout: Duration,
    /// Requests are admitted when the service cannot be reached.
    pub failure_allowed: bool,
    /// Requests admitted this way get the header `x-envoy-auth-failure-mode-allowed: true`.
    pub failure_marked: bool,
    /// Status of the response when the service cannot be reached and `failure_allowed` is false.
    pub status_on_error: u16,
    /// Body of the request in the check; `None`: it is left out.
    pub body: Option<Body>,
    /// The route is selected again after the service has changed the request.
    pub clear_route: bool,
    /// Share of requests that are checked, in millionths.
    pub enabled: u32,
    /// Only requests with these dynamic metadata are checked.
    pub enabled_metadata: Option<MetadataMatch>,
    /// Headers in the check; `None` for all.
    pub allowed_headers: Option<Vec<TextMatch>>,
    /// Headers that the check leaves out.
    pub disallowed_headers: Vec<TextMatch>,
    /// The check contains the client's certificate.
    pub include_certificate: bool,
    /// The check contains the SNI of the client.
    pub include_tls_session: bool,
}

/// Protocol of an authorization service.
#[derive(Debug)]
pub enum AuthorizationService {
    /// gRPC (`envoy.service.auth.v3.Authorization/Check`), with these headers in the call.
    Grpc(Vec<(Box<str>, Box<str>)>),
    /// HTTP: a request like that of the client.
    Http(Box<Http>),
}

/// Settings of an HTTP authorization service.
#[derive(Debug)]
pub struct Http {
    /// Prefix of the path in the check request.
    pub path_prefix: Box<str>,
    /// Headers to add to the check request.
    pub add: Vec<(Box<str>, Box<str>)>,
    /// Headers of an OK response that replace those of the client's request.
    pub upstream: Vec<TextMatch>,
    /// Headers of an OK response that are appended to those of the client's request.
    pub upstream_appended: Vec<TextMatch>,
    /// Headers of a denial that are sent to the client; empty for all.
    pub client: Vec<TextMatch>,
    /// Headers of an OK response that are added to the response to the client.
    pub client_on_success: Vec<TextMatch>,
}

/// Body of the request in a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Body {
    /// Maximum size in bytes.
    pub max_bytes: usize,
    /// A larger body is cut off; otherwise the request is refused with 413.
    pub partial: bool,
    /// The body is sent as bytes instead of a string.
    pub raw: bool,
}
