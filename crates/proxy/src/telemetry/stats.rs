//! Envoy's counters and gauges of clusters, HTTP connection managers and listeners.
//!
//! A worker gets a set of counters from its shard once and keeps it, so that counting is one addition. Names
//! are Envoy's in Prometheus form; labels are those that Istio's bootstrap defines.

use std::cell::Cell;

use super::plain::Kind;
use skysail_policy::config::health::EjectionCause;

/// A counter or gauge.
#[derive(Debug, Default)]
pub struct Counter(Cell<u64>);

impl Counter {
    /// Increments by one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Decrements by one (only for gauges).
    pub fn dec(&self) {
        self.0.set(self.0.get().wrapping_sub(1));
    }

    /// Adds `by`.
    pub fn add(&self, by: u64) {
        self.0.set(self.0.get().wrapping_add(by));
    }

    /// Returns the value.
    pub fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Type of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Type {
    Counter,
    Gauge,
}

impl Type {
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Counter => Kind::Counters,
            Self::Gauge => Kind::Gauges,
        }
    }
}

/// Name, type and value of a metric.
pub(super) type Sample = (&'static str, Type, u64);

/// Defines a set of counters, each with its metric name.
macro_rules! set {
    ($(#[$about:meta])* $name:ident { $($field:ident: $type:ident $metric:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Default)]
        #[expect(missing_docs, reason = "each field is described by its metric")]
        pub struct $name { $(pub $field: Counter,)* }

        impl $name {
            pub(super) fn samples(&self) -> Vec<Sample> {
                vec![$(($metric, Type::$type, self.$field.get()),)*]
            }
        }
    };
}

set! {
    /// Statistics of a cluster, label `cluster_name`.
    ClusterStats {
        cx_total: Counter "envoy_cluster_upstream_cx_total",
        cx_active: Gauge "envoy_cluster_upstream_cx_active",
        cx_overflow: Counter "envoy_cluster_upstream_cx_overflow",
        cx_idle_timeout: Counter "envoy_cluster_upstream_cx_idle_timeout",
        cx_max_requests: Counter "envoy_cluster_upstream_cx_max_requests",
        cx_protocol_error: Counter "envoy_cluster_upstream_cx_protocol_error",
        head_too_large: Counter "skysail_cluster_upstream_head_too_large",
        cx_connect_fail: Counter "envoy_cluster_upstream_cx_connect_fail",
        cx_connect_timeout: Counter "envoy_cluster_upstream_cx_connect_timeout",
        rq_total: Counter "envoy_cluster_upstream_rq_total",
        rq_active: Gauge "envoy_cluster_upstream_rq_active",
        rq_retry: Counter "envoy_cluster_upstream_rq_retry",
        rq_timeout: Counter "envoy_cluster_upstream_rq_timeout",
        rq_per_try_timeout: Counter "envoy_cluster_upstream_rq_per_try_timeout",
        rq_active_overflow: Counter "envoy_cluster_upstream_rq_active_overflow",
        rq_pending_overflow: Counter "envoy_cluster_upstream_rq_pending_overflow",
        rq_retry_overflow: Counter "envoy_cluster_upstream_rq_retry_overflow",
        none_healthy: Counter "envoy_cluster_upstream_cx_none_healthy",
        healthy_panic: Counter "envoy_cluster_lb_healthy_panic",
    }
}

set! {
    /// Results of calls of rate limit services for requests to a cluster, label `cluster_name`.
    RateLimitStats {
        ok: Counter "envoy_cluster_ratelimit_ok",
        over_limit: Counter "envoy_cluster_ratelimit_over_limit",
        error: Counter "envoy_cluster_ratelimit_error",
        failure_mode_allowed: Counter "envoy_cluster_ratelimit_failure_mode_allowed",
    }
}

set! {
    /// Outlier detection statistics of a cluster, label `cluster_name`.
    OutlierStats {
        ejections_active: Gauge "envoy_cluster_outlier_detection_ejections_active",
        ejections_enforced: Counter "envoy_cluster_outlier_detection_ejections_enforced_total",
        ejections_overflow: Counter "envoy_cluster_outlier_detection_ejections_overflow",
        enforced_5xx: Counter "envoy_cluster_outlier_detection_ejections_enforced_consecutive_5xx",
        enforced_gateway: Counter "envoy_cluster_outlier_detection_ejections_enforced_consecutive_gateway_failure",
        enforced_local: Counter
            "envoy_cluster_outlier_detection_ejections_enforced_consecutive_local_origin_failure",
        enforced_rate: Counter "envoy_cluster_outlier_detection_ejections_enforced_success_rate",
        enforced_local_rate: Counter
            "envoy_cluster_outlier_detection_ejections_enforced_local_origin_success_rate",
        enforced_percentage: Counter "envoy_cluster_outlier_detection_ejections_enforced_failure_percentage",
        enforced_local_percentage: Counter
            "envoy_cluster_outlier_detection_ejections_enforced_local_origin_failure_percentage",
        detected_5xx: Counter "envoy_cluster_outlier_detection_ejections_detected_consecutive_5xx",
        detected_gateway: Counter "envoy_cluster_outlier_detection_ejections_detected_consecutive_gateway_failure",
        detected_local: Counter
            "envoy_cluster_outlier_detection_ejections_detected_consecutive_local_origin_failure",
        detected_rate: Counter "envoy_cluster_outlier_detection_ejections_detected_success_rate",
        detected_local_rate: Counter
            "envoy_cluster_outlier_detection_ejections_detected_local_origin_success_rate",
        detected_percentage: Counter "envoy_cluster_outlier_detection_ejections_detected_failure_percentage",
        detected_local_percentage: Counter
            "envoy_cluster_outlier_detection_ejections_detected_local_origin_failure_percentage",
    }
}

impl OutlierStats {
    /// Returns the counters of detected and of enforced ejections for a cause.
    pub fn of(&self, cause: EjectionCause) -> (&Counter, &Counter) {
        match cause {
            EjectionCause::Consecutive5xx => (&self.detected_5xx, &self.enforced_5xx),
            EjectionCause::ConsecutiveGatewayFailure => (&self.detected_gateway, &self.enforced_gateway),
            EjectionCause::ConsecutiveLocalOriginFailure => (&self.detected_local, &self.enforced_local),
            EjectionCause::SuccessRate => (&self.detected_rate, &self.enforced_rate),
            EjectionCause::LocalOriginSuccessRate => (&self.detected_local_rate, &self.enforced_local_rate),
            EjectionCause::FailurePercentage => (&self.detected_percentage, &self.enforced_percentage),
            EjectionCause::LocalOriginFailurePercentage => {
                (&self.detected_local_percentage, &self.enforced_local_percentage)
            }
        }
    }
}

set! {
    /// Statistics of an HTTP connection manager, label `http_conn_manager_prefix`.
    ManagerStats {
        cx_total: Counter "envoy_http_downstream_cx_total",
        cx_active: Gauge "envoy_http_downstream_cx_active",
        rq_total: Counter "envoy_http_downstream_rq_total",
        rq_active: Gauge "envoy_http_downstream_rq_active",
        cx_idle_timeout: Counter "envoy_http_downstream_cx_idle_timeout",
        cx_max_requests: Counter "envoy_http_downstream_cx_max_requests_reached",
        cx_max_duration: Counter "envoy_http_downstream_cx_max_duration_reached",
        cx_protocol_error: Counter "envoy_http_downstream_cx_protocol_error",
        rq_header_timeout: Counter "envoy_http_downstream_rq_header_timeout",
        rq_idle_timeout: Counter "envoy_http_downstream_rq_idle_timeout",
        rq_timeout: Counter "envoy_http_downstream_rq_timeout",
        rq_max_duration: Counter "envoy_http_downstream_rq_max_duration_reached",
        rq_too_large: Counter "envoy_http_downstream_rq_too_large",
        http1_head_size: Counter "skysail_http1_headers_too_large",
        http1_head_fields: Counter "skysail_http1_too_many_headers",
        http2_head_size: Counter "envoy_http2_header_list_size_too_large",
        http2_refused: Counter "envoy_http2_stream_refused_errors",
        rq_overload_close: Counter "envoy_http_downstream_rq_overload_close",
        rq_revoked: Counter "skysail_http_downstream_rq_revoked",
        on_demand: Counter "skysail_on_demand_requests",
        on_demand_micros: Counter "skysail_on_demand_wait_microseconds",
        on_demand_refused: Counter "skysail_on_demand_refused",
        premature_resets: Counter "envoy_http_downstream_rq_too_many_premature_resets",
        http2_window_updates: Counter "envoy_http2_inbound_window_update_frames_flood",
        http2_priorities: Counter "envoy_http2_inbound_priority_frames_flood",
        http2_empty_frames: Counter "envoy_http2_inbound_empty_frames_flood",
        http2_controls: Counter "envoy_http2_outbound_control_flood",
        http2_headers: Counter "envoy_http2_header_overflow",
        http2_keepalive_timeout: Counter "envoy_http2_keepalive_timeout",
        rbac_allowed: Counter "envoy_http_rbac_allowed",
        rbac_denied: Counter "envoy_http_rbac_denied",
        rbac_shadow_allowed: Counter "envoy_http_rbac_shadow_allowed",
        rbac_shadow_denied: Counter "envoy_http_rbac_shadow_denied",
        ext_authz_ok: Counter "envoy_http_ext_authz_ok",
        ext_authz_denied: Counter "envoy_http_ext_authz_denied",
        ext_authz_error: Counter "envoy_http_ext_authz_error",
        ext_proc_started: Counter "envoy_http_ext_proc_streams_started",
        ext_proc_closed: Counter "envoy_http_ext_proc_streams_closed",
        ext_proc_failed: Counter "envoy_http_ext_proc_streams_failed",
        ext_proc_sent: Counter "envoy_http_ext_proc_stream_msgs_sent",
        ext_proc_received: Counter "envoy_http_ext_proc_stream_msgs_received",
        ext_proc_spurious: Counter "envoy_http_ext_proc_spurious_msgs_received",
        ext_proc_immediate: Counter "envoy_http_ext_proc_immediate_responses_sent",
        ext_proc_timeouts: Counter "envoy_http_ext_proc_message_timeouts",
        ext_proc_allowed: Counter "envoy_http_ext_proc_failure_mode_allowed",
        ext_proc_rejected: Counter "envoy_http_ext_proc_rejected_header_mutations",
        ext_proc_extended: Counter "envoy_http_ext_proc_override_message_timeout_received",
        ext_proc_not_extended: Counter "envoy_http_ext_proc_override_message_timeout_ignored",
        jwt_allowed: Counter "envoy_http_jwt_authn_allowed",
        jwt_denied: Counter "envoy_http_jwt_authn_denied",
        fault_delays: Counter "envoy_http_fault_delays_injected",
        fault_aborts: Counter "envoy_http_fault_aborts_injected",
        lua_errors: Counter "envoy_http_lua_errors",
        lua_executions: Counter "envoy_http_lua_executions",
    }
}

set! {
    /// Statistics of the items sent to a collector, labels `cluster_name` and `what`.
    ExportStats {
        sent: Counter "skysail_export_sent_total",
        dropped: Counter "skysail_export_dropped_total",
        failed: Counter "skysail_export_failed_total",
        retried: Counter "skysail_export_retried_total",
    }
}

set! {
    /// Statistics of local rate limits, label `envoy_local_http_ratelimit_prefix`.
    LocalLimitStats {
        enabled: Counter "envoy_http_local_rate_limit_enabled",
        ok: Counter "envoy_http_local_rate_limit_ok",
        limited: Counter "envoy_http_local_rate_limit_rate_limited",
        enforced: Counter "envoy_http_local_rate_limit_enforced",
        shadow_mode: Counter "envoy_http_local_rate_limit_shadow_mode",
    }
}

set! {
    /// Statistics of a limit on connections, label `connection_limit_prefix`.
    ConnectionLimitStats {
        active: Gauge "envoy_connection_limit_active_connections",
        limited: Counter "envoy_connection_limit_limited_connections",
    }
}

set! {
    /// Statistics of a listener, label `listener_address`.
    ListenerStats {
        cx_total: Counter "envoy_listener_downstream_cx_total",
        cx_active: Gauge "envoy_listener_downstream_cx_active",
        pre_cx_active: Gauge "envoy_listener_downstream_pre_cx_active",
        pre_cx_timeout: Counter "envoy_listener_downstream_pre_cx_timeout",
        tls_timeout: Counter "envoy_listener_downstream_cx_transport_socket_connect_timeout",
        tcp_idle_timeout: Counter "envoy_tcp_idle_timeout",
        tcp_max_duration: Counter "envoy_tcp_max_downstream_connection_duration",
        global_overflow: Counter "envoy_listener_downstream_global_cx_overflow",
        overload_reject: Counter "envoy_listener_downstream_cx_overload_reject",
        no_filter_chain: Counter "envoy_listener_no_filter_chain_match",
        revoked: Counter "skysail_listener_downstream_cx_revoked",
        proxy_errors: Counter "envoy_listener_downstream_cx_proxy_proto_error",
        tls_handshakes: Counter "envoy_listener_ssl_handshake",
        tls_resumed: Counter "envoy_listener_ssl_session_reused",
        tls_errors: Counter "envoy_listener_ssl_connection_error",
        rbac_allowed: Counter "envoy_tcp_rbac_allowed",
        rbac_denied: Counter "envoy_tcp_rbac_denied",
        rbac_shadow_allowed: Counter "envoy_tcp_rbac_shadow_allowed",
        rbac_shadow_denied: Counter "envoy_tcp_rbac_shadow_denied",
    }
}
