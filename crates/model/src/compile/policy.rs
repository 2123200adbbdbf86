//! Effective settings of a DestinationRule for a port and a subset.
//!
//! The order is Istio's. Settings for the port replace those of the whole rule. Settings of the mesh configuration fill
//! those that are missing. A subset's settings replace the result one by one; if they are for the port, they replace it
//! as a whole.

use crate::api::{
    DestinationRule, Subset, TrafficPolicy,
    destination_rule::{
        ClientTls, ConnectionPool, LoadBalancer, OutlierDetection, ProxyProtocol, RetryBudget,
    },
    mesh_config::DefaultTrafficPolicy,
};

/// Effective settings of a traffic policy for one port.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Effective<'a> {
    pub(super) load_balancer: Option<&'a LoadBalancer>,
    pub(super) connection_pool: Option<&'a ConnectionPool>,
    pub(super) outlier_detection: Option<&'a OutlierDetection>,
    pub(super) tls: Option<&'a ClientTls>,
    /// Retry budget; settings for a port have none.
    pub(super) retry_budget: Option<&'a RetryBudget>,
    /// PROXY protocol; settings for a port do not replace it.
    pub(super) proxy_protocol: Option<&'a ProxyProtocol>,
}

impl<'a> Effective<'a> {
    /// Returns the settings for the whole service.
    pub(super) fn of_rule(rule: &'a DestinationRule, port: u16) -> Self {
        rule.traffic_policy.as_ref().map(|policy| Self::of_port(policy, port).0).unwrap_or_default()
    }

    /// Returns these settings with those of the mesh where they have none.
    pub(super) fn or(self, mesh: &'a DefaultTrafficPolicy) -> Self {
        Self {
            connection_pool: self.connection_pool.or(mesh.connection_pool.as_ref()),
            outlier_detection: self.outlier_detection.or(mesh.outlier_detection.as_ref()),
            ..self
        }
    }

    /// Returns the settings for a subset of the service that has these settings.
    pub(super) fn of_subset(self, subset: &'a Subset, port: u16) -> Self {
        let whole = self;
        let Some(policy) = &subset.traffic_policy else { return whole };
        let (own, replaces) = Self::of_port(policy, port);
        let proxy_protocol = own.proxy_protocol.or(whole.proxy_protocol);
        if replaces {
            return Self { proxy_protocol, ..own };
        }
        Self {
            load_balancer: own.load_balancer.or(whole.load_balancer),
            connection_pool: own.connection_pool.or(whole.connection_pool),
            outlier_detection: own.outlier_detection.or(whole.outlier_detection),
            tls: own.tls.or(whole.tls),
            retry_budget: own.retry_budget.or(whole.retry_budget),
            proxy_protocol,
        }
    }

    /// Returns a policy's settings for a port, and whether they are defined for this port alone.
    fn of_port(policy: &'a TrafficPolicy, port: u16) -> (Self, bool) {
        let of_port = policy.port_level_settings.iter().find(|own| own.port.number == u32::from(port));
        let settings = match of_port {
            Some(own) => Self {
                load_balancer: own.load_balancer.as_ref(),
                connection_pool: own.connection_pool.as_ref(),
                outlier_detection: own.outlier_detection.as_ref(),
                tls: own.tls.as_ref(),
                retry_budget: None,
                proxy_protocol: policy.proxy_protocol.as_ref(),
            },
            None => Self {
                load_balancer: policy.load_balancer.as_ref(),
                connection_pool: policy.connection_pool.as_ref(),
                outlier_detection: policy.outlier_detection.as_ref(),
                tls: policy.tls.as_ref(),
                retry_budget: policy.retry_budget.as_ref(),
                proxy_protocol: policy.proxy_protocol.as_ref(),
            },
        };
        (settings, of_port.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(text: &str) -> DestinationRule {
        serde_json::from_str(text).unwrap()
    }

    fn limit(effective: &Effective<'_>) -> Option<i32> {
        Some(effective.connection_pool?.tcp.as_ref()?.max_connections)
    }

    #[test]
    fn port_settings_replace_the_whole_and_subsets_single_settings() {
        let rule = rule(
            r#"{"host": "a", "trafficPolicy": {
                "connectionPool": {"tcp": {"maxConnections": 1}}, "tls": {"mode": "DISABLE"},
                "portLevelSettings": [{"port": {"number": 81}, "connectionPool": {"tcp": {"maxConnections": 2}}}]},
              "subsets": [
                {"name": "x", "trafficPolicy": {"connectionPool": {"tcp": {"maxConnections": 3}}}},
                {"name": "y", "trafficPolicy": {"portLevelSettings": [{"port": {"number": 80}, "tls": {"mode": "SIMPLE"}}]}},
                {"name": "z"}]}"#,
        );
        let (x, y, z) = (&rule.subsets[0], &rule.subsets[1], &rule.subsets[2]);
        assert_eq!(limit(&Effective::of_rule(&rule, 80)), Some(1));
        let port = Effective::of_rule(&rule, 81);
        assert_eq!((limit(&port), port.tls), (Some(2), None));
        let subset = Effective::of_rule(&rule, 80).of_subset(x, 80);
        assert_eq!(limit(&subset), Some(3));
        assert!(subset.tls.is_some());
        let replaced = Effective::of_rule(&rule, 80).of_subset(y, 80);
        assert_eq!(limit(&replaced), None);
        assert!(replaced.tls.is_some());
        assert_eq!(limit(&Effective::of_rule(&rule, 81).of_subset(z, 81)), Some(2));
    }

    #[test]
    fn settings_of_the_mesh_fill_those_that_are_missing() {
        let mesh: DefaultTrafficPolicy = serde_json::from_str(
            r#"{"connectionPool": {"tcp": {"maxConnections": 9}}, "outlierDetection": {"interval": "1s"}}"#,
        )
        .unwrap();
        let rule = rule(
            r#"{"host": "a", "trafficPolicy": {"connectionPool": {"http": {"maxRetries": 1}}},
              "subsets": [
                {"name": "x", "trafficPolicy": {"connectionPool": {"tcp": {"maxConnections": 3}}}},
                {"name": "y", "trafficPolicy": {"portLevelSettings": [{"port": {"number": 80}}]}}]}"#,
        );
        let none = Effective::default().or(&mesh);
        assert_eq!((limit(&none), none.outlier_detection.is_some()), (Some(9), true));
        // A rule replaces the whole pool.
        let whole = Effective::of_rule(&rule, 80).or(&mesh);
        assert_eq!((limit(&whole), whole.outlier_detection.is_some()), (None, true));
        let subset = whole.of_subset(&rule.subsets[0], 80);
        assert_eq!((limit(&subset), subset.outlier_detection.is_some()), (Some(3), true));
        let replaced = whole.of_subset(&rule.subsets[1], 80);
        assert_eq!((limit(&replaced), replaced.outlier_detection.is_some()), (None, false));
    }
}
