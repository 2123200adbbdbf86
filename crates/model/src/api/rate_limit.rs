//! RateLimitPolicy (`skysail.io`).

use serde::Deserialize;

/// `spec` of a RateLimitPolicy.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RateLimitPolicy {}
