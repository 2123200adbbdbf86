//! Who else decides whether a request may go on.
//!
//! Source: `envoy.extensions.filters.http.ext_authz.v3.ExtAuthz`.

use std::time::Duration;

use super::text::{MetadataMatch, TextMatch};

/// A service that is asked about requests.
#[derive(Debug)]
pub struct ExternalAuthorization {
    /// Fingerprint of the filter's encoded configuration.
    pub fingerprint: u64,
    /// How it is asked.
    pub service: AuthorizationService,
    /// The cluster that leads to it.
    pub cluster: Box<str>,
    /// `:authority` of what it is asked.
    pub authority: Box<str>,
    /// How long it may take.
    pub timeout: Duration,
    /// Requests go on when it cannot be asked.
    pub failure_allowed: bool,
    /// Those get `x-envoy-auth-failure-mode-allowed: true`.
    pub failure_marked: bool,
    /// What is answered when it cannot be asked.
    pub status_on_error: u16,
    /// How much of a request's body it gets.
    pub body: Option<Body>,
    /// The route is looked for again when it has changed the request.
    pub clear_route: bool,
    /// Only this share of requests is asked about, in millionths.
    pub enabled: u32,
    /// Only requests of which filters before found this out are asked about.
    pub enabled_metadata: Option<MetadataMatch>,
    /// Only these headers are told; `None` for all.
    pub allowed_headers: Option<Vec<TextMatch>>,
    /// These are not.
    pub disallowed_headers: Vec<TextMatch>,
    /// It gets the client's certificate.
    pub include_certificate: bool,
    /// It gets the server name that the client asked for.
    pub include_tls_session: bool,
}

/// How the service is asked.
#[derive(Debug)]
pub enum AuthorizationService {
    /// By gRPC (`envoy.service.auth.v3.Authorization/Check`), with these headers.
    Grpc(Vec<(Box<str>, Box<str>)>),
    /// By a request like the client's.
    Http(Box<Http>),
}

/// How an HTTP service is asked.
#[derive(Debug)]
pub struct Http {
    /// Before the request's path.
    pub path_prefix: Box<str>,
    /// Headers that it gets besides.
    pub add: Vec<(Box<str>, Box<str>)>,
    /// Headers of its consent that replace the request's.
    pub upstream: Vec<TextMatch>,
    /// Headers of its consent that are appended to the request's.
    pub upstream_appended: Vec<TextMatch>,
    /// Headers of its refusal that the client gets; empty for all.
    pub client: Vec<TextMatch>,
    /// Headers of its consent that the client gets with the answer.
    pub client_on_success: Vec<TextMatch>,
}

/// How much of a request's body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Body {
    /// At most so many bytes.
    pub most: usize,
    /// Of larger ones the beginning; otherwise they are refused with 413.
    pub partial: bool,
    /// As bytes instead of text.
    pub raw: bool,
}
