//! Validation of GatewayClass, Gateway, ListenerSet, HttpRoute, GrpcRoute, TlsRoute, TcpRoute, ReferenceGrant, BackendTlsPolicy.

use super::Finding;
use crate::api::gateway_api::{
    BackendTlsPolicy, Gateway, GatewayClass, GrpcRoute, HttpRoute, ListenerSet, ReferenceGrant, TcpRoute,
    TlsRoute,
};

/// Checks a GatewayClass.
pub(crate) fn gateway_class(_: &GatewayClass) -> Vec<Finding> {
    Vec::new()
}

/// Checks a Gateway.
pub(crate) fn kubernetes_gateway(_: &Gateway) -> Vec<Finding> {
    Vec::new()
}

/// Checks a ListenerSet.
pub(crate) fn listener_set(_: &ListenerSet) -> Vec<Finding> {
    Vec::new()
}

/// Checks a HttpRoute.
pub(crate) fn http_route(_: &HttpRoute) -> Vec<Finding> {
    Vec::new()
}

/// Checks a GrpcRoute.
pub(crate) fn grpc_route(_: &GrpcRoute) -> Vec<Finding> {
    Vec::new()
}

/// Checks a TlsRoute.
pub(crate) fn tls_route(_: &TlsRoute) -> Vec<Finding> {
    Vec::new()
}

/// Checks a TcpRoute.
pub(crate) fn tcp_route(_: &TcpRoute) -> Vec<Finding> {
    Vec::new()
}

/// Checks a ReferenceGrant.
pub(crate) fn reference_grant(_: &ReferenceGrant) -> Vec<Finding> {
    Vec::new()
}

/// Checks a BackendTlsPolicy.
pub(crate) fn backend_tls_policy(_: &BackendTlsPolicy) -> Vec<Finding> {
    Vec::new()
}
