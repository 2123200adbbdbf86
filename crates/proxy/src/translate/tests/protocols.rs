//! Translation of the PROXY protocol and HTTP/2 settings.

use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            cluster::v3::cluster::TransportSocketMatch,
            core::v3::{
                Http2ProtocolOptions, HttpProtocolOptions, KeepaliveSettings, ProxyProtocolConfig,
                TransportSocket, transport_socket,
            },
            listener::v3::{
                ListenerFilter, ListenerFilterChainMatchPredicate as Predicate, listener_filter,
                listener_filter_chain_match_predicate::Rule,
            },
        },
        extensions::{
            filters::listener::{
                proxy_protocol::v3::{ProxyProtocol, proxy_protocol},
                tls_inspector::v3::TlsInspector,
            },
            transport_sockets::{
                proxy_protocol::v3::ProxyProtocolUpstreamTransport, raw_buffer::v3::RawBuffer,
            },
        },
        r#type::v3::Int32Range,
    },
    google::protobuf::UInt32Value,
};

use super::*;
use crate::translate::http::http2_options;
use skysail_http::proxy_protocol::ProxyVersion;

/// Packs a message into an `Any`.
fn packed<M: Message + Name>(message: &M) -> Any {
    Any { type_url: format!("type.googleapis.com/{}", M::full_name()), value: message.encode_to_vec() }
}

#[test]
fn unsupported_proxy_protocol_settings_are_refused() {
    let outcome = |filters: Vec<Any>| {
        let listener_filters = filters.into_iter().map(|any| ListenerFilter {
            name: "f".to_owned(),
            config_type: Some(listener_filter::ConfigType::TypedConfig(any)),
            ..ListenerFilter::default()
        });
        let proto = ListenerProto {
            name: "l".to_owned(),
            address: Some(address_proto("127.0.0.1", 1)),
            listener_filters: listener_filters.collect(),
            ..ListenerProto::default()
        };
        with(false, |translator| translator.listener(&proto.encode_to_vec())).unwrap_err().to_string()
    };
    let rules = ProxyProtocol { rules: vec![proxy_protocol::Rule::default()], ..ProxyProtocol::default() };
    let reason = outcome(vec![packed(&rules)]);
    assert!(reason.contains("rules"), "{reason}");
    let reason = outcome(vec![packed(&TlsInspector::default()), packed(&ProxyProtocol::default())]);
    assert!(reason.starts_with("listener_filters[1]: must come before"), "{reason}");
    // The filters are accepted; only the filter chain is missing.
    let reason = outcome(vec![packed(&ProxyProtocol::default()), packed(&TlsInspector::default())]);
    assert!(reason.contains("needs a filter chain"), "{reason}");
}

#[test]
fn ports_excluded_from_a_listener_filter_are_ranges() {
    let outcome = |start, end| {
        let range = Rule::DestinationPortRange(Int32Range { start, end });
        let filter = ListenerFilter {
            name: "f".to_owned(),
            config_type: Some(listener_filter::ConfigType::TypedConfig(packed(&TlsInspector::default()))),
            filter_disabled: Some(Predicate { rule: Some(range) }),
        };
        let proto = ListenerProto {
            name: "l".to_owned(),
            address: Some(address_proto("127.0.0.1", 1)),
            listener_filters: vec![filter],
            ..ListenerProto::default()
        };
        with(false, |translator| translator.listener(&proto.encode_to_vec())).unwrap_err().to_string()
    };
    for (start, end) in [(80, 81), (0, 65_536), (65_535, 65_536)] {
        let reason = outcome(start, end);
        assert!(reason.contains("needs a filter chain"), "{start} {end}: {reason}");
    }
    for (start, end) in
        [(80, 80), (81, 80), (0, i32::MIN), (-1, 5), (0, 0), (0, 65_537), (i32::MIN, i32::MAX)]
    {
        let reason = outcome(start, end);
        let place = "listener_filters[0].filter_disabled.destination_port_range: ";
        assert!(reason.starts_with(place) && reason.contains("not a range of ports"), "{reason}");
    }
}

#[test]
fn head_limits_are_translated() {
    use crate::translate::http::{max_head, max_headers};
    let some = |value| Some(UInt32Value { value });
    assert_eq!(max_head(None).unwrap(), 60 << 10);
    assert_eq!(max_head(some(8192)).unwrap(), 8 << 20);
    assert!(max_head(some(0)).is_err() && max_head(some(8193)).is_err());
    assert_eq!(max_headers(None).unwrap(), 100);
    let common = |value| HttpProtocolOptions { max_headers_count: some(value), ..Default::default() };
    assert_eq!(max_headers(Some(&common(7))).unwrap(), 7);
    assert!(max_headers(Some(&common(0))).is_err());
}

#[test]
fn all_endpoints_of_a_cluster_use_one_proxy_protocol_version() {
    let socket = |version: Option<i32>| {
        let any = match version {
            None => packed(&RawBuffer::default()),
            Some(version) => packed(&ProxyProtocolUpstreamTransport {
                config: Some(ProxyProtocolConfig { version, ..ProxyProtocolConfig::default() }),
                transport_socket: Some(TransportSocket {
                    name: "raw".to_owned(),
                    config_type: Some(transport_socket::ConfigType::TypedConfig(packed(&RawBuffer {}))),
                }),
                ..ProxyProtocolUpstreamTransport::default()
            }),
        };
        let config_type = Some(transport_socket::ConfigType::TypedConfig(any));
        Some(TransportSocket { name: "s".to_owned(), config_type })
    };
    let outcome = |matches: &[Option<i32>], other: Option<Option<i32>>| {
        let one = |version: &Option<i32>| TransportSocketMatch {
            name: "m".to_owned(),
            transport_socket: socket(*version),
            ..TransportSocketMatch::default()
        };
        let proto = ClusterProto {
            name: "c".to_owned(),
            transport_socket_matches: matches.iter().map(one).collect(),
            transport_socket: other.and_then(socket),
            ..ClusterProto::default()
        };
        let cluster = with(false, |translator| translator.cluster(&proto.encode_to_vec()));
        cluster.map(|cluster| cluster.proxy_protocol).map_err(|reject| reject.to_string())
    };
    assert_eq!(outcome(&[], None), Ok(None));
    assert_eq!(outcome(&[], Some(Some(0))), Ok(Some(ProxyVersion::V1)));
    assert_eq!(outcome(&[Some(1), Some(1)], None), Ok(Some(ProxyVersion::V2)));
    for mixed in [outcome(&[Some(1), None], None), outcome(&[Some(1)], Some(Some(0)))] {
        assert!(mixed.unwrap_err().contains("the same PROXY protocol"));
    }
}

#[test]
fn window_sizes_are_those_of_http2() {
    let options = |size| Http2ProtocolOptions {
        initial_stream_window_size: Some(UInt32Value { value: size }),
        ..Http2ProtocolOptions::default()
    };
    assert_eq!(http2_options(Some(&options(65_535)), 7).unwrap().stream_window, 65_535);
    let default = http2_options(None, 7).unwrap();
    assert_eq!((default.max_streams, default.stream_window), (7, 256 * 1024));
    for size in [65_534, 1 << 31] {
        let reason = http2_options(Some(&options(size)), 7).unwrap_err().to_string();
        assert!(reason.starts_with("initial_stream_window_size: "), "{reason}");
    }
    let keepalive = KeepaliveSettings { timeout: None, ..KeepaliveSettings::default() };
    let options = Http2ProtocolOptions { connection_keepalive: Some(keepalive), ..Default::default() };
    let reason = http2_options(Some(&options), 7).unwrap_err().to_string();
    assert!(reason.starts_with("connection_keepalive.timeout: "), "{reason}");
}
