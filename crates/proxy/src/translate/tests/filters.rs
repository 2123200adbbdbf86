//! Translation of HTTP filters: limits of their values.

use skysail_xds::envoy::pb::{
    envoy::{
        config::{
            common::mutation_rules::v3::{HeaderMutation as MutationProto, header_mutation},
            core::v3::{GrpcService, KeyValueMutation, grpc_service},
            ratelimit::v3::RateLimitServiceConfig,
            route::v3::{
                RateLimit as RuleProto,
                rate_limit::{Action as ActionProto, HitsAddend, action},
            },
        },
        extensions::{
            common::ratelimit::v3::{LocalRateLimitDescriptor, rate_limit_descriptor::Entry},
            filters::http::{
                buffer::v3::Buffer,
                header_mutation::v3::{HeaderMutation, Mutations},
                local_ratelimit::v3::LocalRateLimit,
                ratelimit::v3::RateLimit as ServiceLimit,
            },
        },
        r#type::v3::TokenBucket,
    },
    google::protobuf::{Duration as DurationProto, UInt32Value, UInt64Value},
};

use super::*;

fn bucket() -> Option<TokenBucket> {
    let fill_interval = Some(DurationProto { seconds: 1, nanos: 0 });
    Some(TokenBucket { max_tokens: 1, fill_interval, ..TokenBucket::default() })
}

fn descriptor(value: &str) -> LocalRateLimitDescriptor {
    LocalRateLimitDescriptor {
        entries: vec![Entry { key: "k".to_owned(), value: value.to_owned() }],
        token_bucket: bucket(),
        ..LocalRateLimitDescriptor::default()
    }
}

/// Returns a rule with this action.
fn rule(action: action::ActionSpecifier) -> RuleProto {
    RuleProto { actions: vec![ActionProto { action_specifier: Some(action) }], ..RuleProto::default() }
}

#[test]
fn local_rate_limits_are_refused_by_field() {
    let limit = |change: &dyn Fn(&mut LocalRateLimit)| {
        let mut proto = LocalRateLimit { token_bucket: bucket(), ..LocalRateLimit::default() };
        change(&mut proto);
        limit::translate(&proto).map(|_| ()).map_err(|reject| reject.path)
    };
    let refused = |path: &str| Err(path.to_owned());
    assert_eq!(limit(&|proto| proto.descriptors = vec![descriptor("a"), descriptor("")]), Ok(()));
    assert_eq!(
        limit(&|proto| proto.descriptors = vec![descriptor("a"), descriptor("a")]),
        refused("descriptors")
    );
    assert_eq!(
        limit(&|proto| {
            proto.descriptors = vec![descriptor("")];
            proto.local_rate_limit_per_downstream_connection = true;
        }),
        refused("local_rate_limit_per_downstream_connection")
    );
    assert_eq!(
        limit(&|proto| {
            proto.descriptors = vec![LocalRateLimitDescriptor { token_bucket: None, ..descriptor("a") }];
        }),
        refused("descriptors[0].token_bucket")
    );
    assert_eq!(
        limit(&|proto| proto.max_dynamic_descriptors = Some(UInt32Value { value: 0 })),
        refused("max_dynamic_descriptors")
    );
    assert_eq!(limit(&|proto| proto.stage = 11), refused("stage"));
}

#[test]
fn rules_are_refused_by_field() {
    let address = || rule(action::ActionSpecifier::RemoteAddress(action::RemoteAddress {}));
    let check = |rule: RuleProto| limit_rules::translate(&[rule]).map(|_| ()).map_err(|reject| reject.path);
    let refused = |path: &str| Err(format!("rate_limits[0]{path}"));
    assert_eq!(check(address()), Ok(()));
    assert_eq!(check(RuleProto::default()), refused(".actions"));
    let done = RuleProto { apply_on_stream_done: true, ..address() };
    assert_eq!(check(done), refused(".apply_on_stream_done"));
    let hits = |number, format: &str| RuleProto {
        hits_addend: Some(HitsAddend { number, format: format.to_owned(), ..HitsAddend::default() }),
        ..address()
    };
    assert_eq!(check(hits(Some(UInt64Value { value: 2 }), "")), Ok(()));
    assert_eq!(check(hits(None, "%BYTES_RECEIVED%")), Ok(()));
    assert_eq!(check(hits(Some(UInt64Value { value: 2 }), "1")), refused(".hits_addend"));
    let masked = action::MaskedRemoteAddress {
        v4_prefix_mask_len: Some(UInt32Value { value: 33 }),
        ..action::MaskedRemoteAddress::default()
    };
    assert_eq!(
        check(rule(action::ActionSpecifier::MaskedRemoteAddress(masked))),
        refused(".actions[0].masked_remote_address.v4_prefix_mask_len")
    );
    let header = action::RequestHeaders { header_name: "x-a".to_owned(), ..Default::default() };
    assert_eq!(
        check(rule(action::ActionSpecifier::RequestHeaders(header))),
        refused(".actions[0].request_headers.descriptor_key")
    );
    let matched = action::RemoteAddressMatch::default();
    assert_eq!(check(rule(action::ActionSpecifier::RemoteAddressMatch(matched))), refused(".actions[0]"));
}

#[test]
fn rate_limit_services_are_refused_by_field() {
    let service = |cluster: &str| {
        let target = grpc_service::EnvoyGrpc { cluster_name: cluster.to_owned(), ..Default::default() };
        let target = Some(grpc_service::TargetSpecifier::EnvoyGrpc(target));
        let grpc = GrpcService { target_specifier: target, ..GrpcService::default() };
        Some(RateLimitServiceConfig { grpc_service: Some(grpc), ..RateLimitServiceConfig::default() })
    };
    let whole = || ServiceLimit {
        domain: "d".to_owned(),
        rate_limit_service: service("c"),
        ..ServiceLimit::default()
    };
    let refused = |proto| global_limit::translate(&proto).unwrap_err().path;
    let good = global_limit::translate(&whole()).unwrap();
    assert_eq!((good.timeout.as_millis(), good.status, good.status_on_error), (20, 429, 500));
    assert_eq!((good.enabled, good.enforced, good.denied_on_failure), (1_000_000, 1_000_000, 0));
    assert_eq!(refused(ServiceLimit { domain: String::new(), ..whole() }), "domain");
    assert_eq!(refused(ServiceLimit { request_type: "any".to_owned(), ..whole() }), "request_type");
    let without = ServiceLimit { rate_limit_service: None, ..whole() };
    assert_eq!(refused(without), "rate_limit_service.grpc_service");
}

#[test]
fn mutations_and_buffers_are_refused_by_field() {
    let remove =
        |name: &str| MutationProto { action: Some(header_mutation::Action::Remove(name.to_owned())) };
    let check = |mutations: Mutations| {
        let proto = HeaderMutation { mutations: Some(mutations), ..HeaderMutation::default() };
        mutation::translate(&proto).map(|_| ()).map_err(|reject| reject.path)
    };
    assert_eq!(check(Mutations { request_mutations: vec![remove("x-a")], ..Mutations::default() }), Ok(()));
    for name in [":path", "host"] {
        let mutations = Mutations { response_mutations: vec![remove(name)], ..Mutations::default() };
        assert_eq!(check(mutations), Err("mutations.response_mutations[0].remove".to_owned()));
    }
    let query = vec![KeyValueMutation::default()];
    assert_eq!(
        check(Mutations { query_parameter_mutations: query, ..Mutations::default() }),
        Err("mutations.query_parameter_mutations[0]".to_owned())
    );
    let buffer = |max| {
        let proto = Buffer { max_request_bytes: Some(UInt32Value { value: max }) };
        mutation::buffer(&proto).map_err(|reject| reject.path)
    };
    assert_eq!(buffer(1 << 20), Ok(1 << 20));
    assert_eq!(buffer(0), Err("max_request_bytes".to_owned()));
    assert_eq!(buffer(1 << 30), Err("max_request_bytes".to_owned()));
}
