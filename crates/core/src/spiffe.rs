//! SPIFFE IDs of workloads: `spiffe://cluster.local/ns/default/sa/reviews`.
//!
//! Source: the SPIFFE-ID specification, section 2, with the path that Istio gives to service accounts.

use std::{fmt, str::FromStr};

/// SPIFFE ID of a service account.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpiffeId {
    /// Trust domain, such as `cluster.local`.
    pub trust_domain: String,
    /// Kubernetes namespace.
    pub namespace: String,
    /// Name of the service account.
    pub service_account: String,
}

/// Error for a text that is not the SPIFFE ID of a service account.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{0:?} is not of the form spiffe://TRUST-DOMAIN/ns/NAMESPACE/sa/SERVICE-ACCOUNT")]
pub struct InvalidSpiffeId(String);

impl SpiffeId {
    /// Creates an id from its parts.
    pub fn new(
        trust_domain: impl Into<String>,
        namespace: impl Into<String>,
        service_account: impl Into<String>,
    ) -> Self {
        Self {
            trust_domain: trust_domain.into(),
            namespace: namespace.into(),
            service_account: service_account.into(),
        }
    }

    /// Returns the principal, the form without the scheme that AuthorizationPolicy and metrics use:
    /// `cluster.local/ns/default/sa/reviews`.
    pub fn principal(&self) -> String {
        format!("{}/ns/{}/sa/{}", self.trust_domain, self.namespace, self.service_account)
    }
}

impl fmt::Display for SpiffeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spiffe://{}/ns/{}/sa/{}", self.trust_domain, self.namespace, self.service_account)
    }
}

impl FromStr for SpiffeId {
    type Err = InvalidSpiffeId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts = || {
            let mut parts = text.strip_prefix("spiffe://")?.split('/');
            let trust_domain = parts.next()?;
            let namespace = (parts.next()? == "ns").then(|| parts.next())??;
            let account = (parts.next()? == "sa").then(|| parts.next())??;
            let whole = parts.next().is_none();
            let filled = ![trust_domain, namespace, account].contains(&"");
            (whole && filled).then(|| Self::new(trust_domain, namespace, account))
        };
        parts().ok_or_else(|| InvalidSpiffeId(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_round_trip_and_others_are_refused() {
        let text = "spiffe://cluster.local/ns/default/sa/reviews";
        let id: SpiffeId = text.parse().unwrap();
        assert_eq!(id.to_string(), text);
        assert_eq!(id.principal(), "cluster.local/ns/default/sa/reviews");
        for bad in [
            "",
            "spiffe://",
            "spiffe://a/ns/b/sa/",
            "spiffe://a/ns/b/sa/c/d",
            "https://a/ns/b/sa/c",
            "spiffe://a/x/b/sa/c",
        ] {
            assert!(bad.parse::<SpiffeId>().is_err(), "{bad}");
        }
    }
}
