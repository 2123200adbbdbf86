//! JWT authentication of requests.
//!
//! Source: `envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication`.

use std::{sync::Arc, time::Duration};

pub use skysail_identity::jwks::{KeySet, VerificationKey};

use super::route::RouteMatch;
use crate::state::PublishedOption;

/// Settings of the filter: providers, and the requirement of each request.
#[derive(Debug)]
pub struct Jwt {
    /// Fingerprint of the filter's encoded configuration.
    pub fingerprint: u64,
    /// Providers. A [`Requirement`] refers to them by index.
    pub providers: Vec<JwtProvider>,
    /// Requirement by route match. The first match applies; a request that matches none needs no token.
    pub rules: Vec<(RouteMatch, Requirement)>,
    /// Requirements that routes refer to by name.
    pub named: Vec<(Box<str>, Requirement)>,
    /// CORS preflights need no token.
    pub bypass_preflight: bool,
}

/// A provider: one issuer of tokens. Source: `JwtProvider`.
#[derive(Debug)]
pub struct JwtProvider {
    /// Name.
    pub name: Box<str>,
    /// Issuer whose tokens are accepted; `None` for any.
    pub issuer: Option<Box<str>>,
    /// Accepted audiences, one of which the token must have; empty for any.
    pub audiences: Vec<Box<str>>,
    /// Keys that verify signatures.
    pub keys: Keys,
    /// The token stays in the request to the upstream.
    pub forward: bool,
    /// Places of the token in a request.
    pub from: Vec<Source>,
    /// Key of the claims in the dynamic metadata.
    pub payload_in_metadata: Option<Box<str>>,
    /// Key of the token's header in the dynamic metadata.
    pub header_in_metadata: Option<Box<str>>,
    /// Claims with space-separated values that become lists in the dynamic metadata.
    pub spaced_claims: Vec<Box<str>>,
    /// Header that receives the claims as they are encoded in the token (base64url).
    pub payload_header: Option<Box<str>>,
    /// The value of [`Self::payload_header`] is padded.
    pub pad_payload_header: bool,
    /// Headers that receive claims, each with the path of its claim.
    pub claim_headers: Vec<(Box<str>, Vec<Box<str>>)>,
    /// Tolerance for `exp` and `nbf`, as clocks differ.
    pub clock_skew: Duration,
    /// The route is selected again after a valid token.
    pub clear_route: bool,
}

/// A place of a token in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A header (lower case) and the prefix of its value.
    Header(Box<str>, Box<str>),
    /// A query parameter.
    Param(Box<str>),
    /// A cookie.
    Cookie(Box<str>),
}

/// Keys of a provider.
#[derive(Debug)]
pub enum Keys {
    /// Keys in the configuration (`local_jwks`).
    Local(Arc<KeySet>),
    /// Keys that the proxy fetches.
    Remote(RemoteKeys),
}

/// Keys on a server (`remote_jwks`).
#[derive(Debug)]
pub struct RemoteKeys {
    /// Cluster of the server.
    pub cluster: Box<str>,
    /// `:authority` of the request, such as `auth.example`.
    pub authority: Box<str>,
    /// Path of the request, such as `/jwks.json`.
    pub path: Box<str>,
    /// Timeout of the request.
    pub timeout: Duration,
    /// Time for which fetched keys are used.
    pub lifetime: Duration,
    /// Keys of the last fetch, and the time at which they expire. All workers share them.
    pub fetched: Arc<PublishedOption<(std::time::Instant, Arc<KeySet>)>>,
}

/// Token that a request must have. Source: `JwtRequirement`. Providers are given by index into [`Jwt::providers`].
#[derive(Clone, Debug)]
pub enum Requirement {
    /// No token is required.
    Nothing,
    /// A token of this provider. The audiences, if given, replace those of the provider.
    Provider(usize, Option<Vec<Box<str>>>),
    /// One of these requirements.
    Any(Vec<Requirement>),
    /// All of these requirements.
    All(Vec<Requirement>),
    /// The request has no token in any place of these providers.
    AllowMissing(Vec<usize>),
    /// Any request, even with an invalid token.
    AllowMissingOrFailed,
}
