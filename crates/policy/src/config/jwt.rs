//! Which tokens requests must have.
//!
//! Source: `envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication`.

use std::{sync::Arc, time::Duration};

pub use skysail_identity::jwks::{KeySet, VerificationKey};

use super::route::RouteMatch;
use crate::state::PublishedOption;

/// Who issues tokens, and who must have which.
#[derive(Debug)]
pub struct Jwt {
    /// Fingerprint of the filter's encoded configuration.
    pub fingerprint: u64,
    /// By name.
    pub providers: Vec<JwtProvider>,
    /// The first that matches counts; where none does, no token is needed.
    pub rules: Vec<(RouteMatch, Requirement)>,
    /// What routes may ask for by name.
    pub named: Vec<(Box<str>, Requirement)>,
    /// CORS preflights need none.
    pub bypass_preflight: bool,
}

/// One issuer. Source: `JwtProvider`.
#[derive(Debug)]
pub struct JwtProvider {
    /// The name that requirements use.
    pub name: Box<str>,
    /// Whose tokens it takes; `None` for anybody's.
    pub issuer: Option<Box<str>>,
    /// One of these must be among the token's; empty for any.
    pub audiences: Vec<Box<str>>,
    /// What signatures are checked with.
    pub keys: Keys,
    /// The token goes on to the upstream.
    pub forward: bool,
    /// Where tokens are looked for.
    pub from: Vec<Source>,
    /// Under which name the claims are known to other filters.
    pub payload_in_metadata: Option<Box<str>>,
    /// Under which name the token's header is known to other filters.
    pub header_in_metadata: Option<Box<str>>,
    /// Claims whose words become lists there.
    pub spaced_claims: Vec<Box<str>>,
    /// Gets the claims as they stand in the token (base64url).
    pub payload_header: Option<Box<str>>,
    /// Whether that is padded.
    pub pad_payload_header: bool,
    /// Headers and the claims they get, each by its path.
    pub claim_headers: Vec<(Box<str>, Vec<Box<str>>)>,
    /// How wrong clocks may be.
    pub clock_skew: Duration,
    /// The route is looked for again after a good token.
    pub clear_route: bool,
}

/// Where a token may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// In a header (lower case), after these characters.
    Header(Box<str>, Box<str>),
    /// In a parameter of the query.
    Param(Box<str>),
    /// In a cookie.
    Cookie(Box<str>),
}

/// Where keys come from.
#[derive(Debug)]
pub enum Keys {
    /// They stand in the configuration.
    Here(Arc<KeySet>),
    /// They are fetched.
    Remote(RemoteKeys),
}

/// Keys that a server has (`remote_jwks`). Those fetched last are shared by all workers.
#[derive(Debug)]
pub struct RemoteKeys {
    /// The cluster that leads there.
    pub cluster: Box<str>,
    /// `auth.example`.
    pub authority: Box<str>,
    /// `/jwks.json`.
    pub path: Box<str>,
    /// How long an answer is waited for.
    pub timeout: Duration,
    /// For how long keys are good.
    pub lifetime: Duration,
    /// Those there are, and until when they are good.
    pub known: Arc<PublishedOption<(std::time::Instant, Arc<KeySet>)>>,
}

/// Which token is needed. Source: `JwtRequirement`. Providers are told by their places.
#[derive(Clone, Debug)]
pub enum Requirement {
    /// None.
    Nothing,
    /// One of this provider, with one of these audiences, if given, instead of the provider's.
    Provider(usize, Option<Vec<Box<str>>>),
    /// One of these must hold.
    Any(Vec<Requirement>),
    /// All of these must hold.
    All(Vec<Requirement>),
    /// There is none where these providers look for them.
    AllowMissing(Vec<usize>),
    /// There may be none, or a bad one.
    AllowMissingOrFailed,
}
