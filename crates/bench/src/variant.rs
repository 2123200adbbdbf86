//! Variants of the configuration of sidecars: telemetry, policies and external authorization, as in Istio's benchmark.

use serde::{Deserialize, Serialize};

use crate::{node::Extra, peers::Peer, token::Token};

/// Number of access policies of a variant. The request meets the last one only.
const POLICIES: u16 = 100;

/// Variant of the sidecars' configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Variant {
    /// The configuration of all other benchmarks.
    #[default]
    Usual,
    /// No filter that makes metrics alone. Envoy keeps no metrics at all.
    NoTelemetry,
    /// Istio's standard metrics.
    Metrics,
    /// An access log to a file.
    AccessLog,
    /// Access policies by the address of the caller.
    PoliciesAddress,
    /// Access policies by path.
    PoliciesPath,
    /// Verification of a JSON Web Token, and access policies by its subject.
    PoliciesJwt,
    /// A check by a server of external authorization.
    ExternalAuthorization,
}

impl Variant {
    pub(crate) const ALL: [Self; 8] = [
        Self::Usual,
        Self::NoTelemetry,
        Self::Metrics,
        Self::AccessLog,
        Self::PoliciesAddress,
        Self::PoliciesPath,
        Self::PoliciesJwt,
        Self::ExternalAuthorization,
    ];

    /// Returns the name in scenarios and result files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Usual => "usual",
            Self::NoTelemetry => "no-telemetry",
            Self::Metrics => "metrics",
            Self::AccessLog => "access-log",
            Self::PoliciesAddress => "policies-address",
            Self::PoliciesPath => "policies-path",
            Self::PoliciesJwt => "policies-jwt",
            Self::ExternalAuthorization => "external-authorization",
        }
    }

    /// Returns a text followed by the name, as in `envoy, metrics`; the text alone for the usual configuration.
    pub(crate) fn after(self, text: &str) -> String {
        if self.is_usual() { text.to_owned() } else { format!("{text}, {}", self.name()) }
    }

    /// Returns true for the usual configuration; for serialization.
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
    pub(crate) fn is_usual(&self) -> bool {
        *self == Self::Usual
    }

    /// Returns true if the configuration of the peer can express the variant. The filter of Istio's metrics exists only
    /// in Istio's build of Envoy.
    pub(crate) fn is_possible(self, peer: Option<Peer>) -> bool {
        match self {
            Self::Usual => true,
            Self::Metrics => peer == Some(Peer::Skysail),
            _ => matches!(peer, Some(Peer::Skysail | Peer::Envoy)),
        }
    }

    /// Returns the configuration beyond the usual one, except for the access log.
    ///
    /// # Errors
    /// The token cannot be issued.
    pub(crate) fn extra(self) -> anyhow::Result<Extra> {
        Ok(match self {
            Self::Usual | Self::AccessLog => Extra::None,
            Self::NoTelemetry => Extra::NoTelemetry,
            Self::Metrics => Extra::Metrics,
            Self::PoliciesAddress => Extra::Addresses(POLICIES),
            Self::PoliciesPath => Extra::Policies(POLICIES),
            Self::PoliciesJwt => Extra::TokenPolicies(Token::issue()?, POLICIES),
            Self::ExternalAuthorization => Extra::Authorizer,
        })
    }
}

/// Returns the variants of a run without variants.
pub(crate) fn only_usual() -> Vec<Variant> {
    vec![Variant::Usual]
}

/// Returns true if a run has no variants.
pub(crate) fn is_only_usual(variants: &[Variant]) -> bool {
    variants == [Variant::Usual]
}
