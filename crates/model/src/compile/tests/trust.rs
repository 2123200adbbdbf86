//! Roots that are bound to trust domains.

use skysail_xds::envoy::pb::envoy::extensions::transport_sockets::tls::v3::{
    CertificateValidationContext, CommonTlsContext, DownstreamTlsContext, SdsSecretConfig, Secret,
    SpiffeCertValidatorConfig, common_tls_context::ValidationContextType, secret::Type,
};

use super::*;

const WEST: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: istio, namespace: istio-system}
data:
  mesh: |
    trustDomain: west
    trustDomainAliases: [former, east]
";
const ROOTS: &str = include_str!("roots.txt");

/// Returns a World of trust domain `west`. `ca_certificates` adds the second root for `east`, and the third without a
/// trust domain.
fn west(ca_certificates: bool) -> World {
    let [_, east, extra] = roots();
    let indented = |pem: &str| pem.lines().map(|line| format!("        {line}\n")).collect::<String>();
    let entries = format!(
        "    caCertificates:\n    - trustDomains: [east]\n      pem: |\n{}    - pem: |\n{}",
        indented(&east),
        indented(&extra)
    );
    world(&if ca_certificates { format!("{WEST}{entries}") } else { WEST.to_owned() })
}

fn roots() -> [String; 3] {
    let end = "-----END CERTIFICATE-----\n";
    let roots: Vec<_> = ROOTS.split_inclusive(end).map(str::to_owned).collect();
    roots.try_into().unwrap()
}

/// Returns the source of a TLS context's roots.
fn trust(common: Option<CommonTlsContext>) -> SdsSecretConfig {
    match common.and_then(|common| common.validation_context_type) {
        Some(ValidationContextType::CombinedValidationContext(combined)) => {
            combined.validation_context_sds_secret_config.unwrap()
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the sources of roots of port 3306, inbound and outbound.
fn trusts(made: &Resources) -> [SdsSecretConfig; 2] {
    let typed = |socket: &core::TransportSocket| match &socket.config_type {
        Some(core::transport_socket::ConfigType::TypedConfig(any)) => any.clone(),
        other => panic!("{other:?}"),
    };
    let sockets = chains(made, 3306).into_iter().filter_map(|chain| chain.transport_socket);
    let inbound = sockets.into_iter().find_map(|socket| unpack::<DownstreamTlsContext>(&typed(&socket)));
    let cluster: cluster::Cluster = get(made, Kind::Cluster, "outbound|3306||db.shop.svc.cluster.local");
    let sockets = cluster.transport_socket_matches.into_iter().filter_map(|one| one.transport_socket);
    let outbound = sockets.into_iter().find_map(|socket| unpack::<UpstreamTlsContext>(&typed(&socket)));
    [trust(inbound.unwrap().common_tls_context), trust(outbound.unwrap().common_tls_context)]
}

#[test]
fn roots_of_another_mesh_are_bound_to_its_trust_domain() {
    let mut world = west(true);
    let (own, name) = (roots()[0].clone(), "trust-bundles");
    assert!(compile(&world, &view()).0.get(Kind::Secret, name).is_none(), "our own roots are not known yet");
    world.take_changes();
    assert!(world.set_roots(&own) && world.take_changes().everything);
    assert!(!world.set_roots(&own));
    let made = compile(&world, &view()).0;
    for trust in trusts(&made) {
        assert_eq!(trust.name, name);
        let source = trust.sds_config.unwrap().config_source_specifier;
        assert!(matches!(source, Some(core::config_source::ConfigSourceSpecifier::Ads(_))), "{source:?}");
    }
    let secret: Secret = get(&made, Kind::Secret, name);
    let Some(Type::ValidationContext(context)) = secret.r#type else { panic!("{secret:?}") };
    let validator = context.custom_validator_config.clone().unwrap();
    assert_eq!(validator.name, "envoy.tls.cert_validator.spiffe");
    let rest = CertificateValidationContext { custom_validator_config: None, ..context };
    assert_eq!(rest, CertificateValidationContext::default());
    let config: SpiffeCertValidatorConfig = unpack(&validator.typed_config.unwrap()).unwrap();
    let bundles: Vec<_> = config
        .trust_domains
        .into_iter()
        .map(|domain| match domain.trust_bundle.unwrap().specifier {
            Some(core::data_source::Specifier::InlineString(pem)) => (domain.name, pem),
            other => panic!("{other:?}"),
        })
        .collect();
    let [own, east, extra] = roots();
    let ours = format!("{own}{extra}");
    let expected = [("east", &east), ("former", &ours), ("west", &ours)];
    assert_eq!(bundles, expected.map(|(name, pem)| (name.to_owned(), pem.clone())));
}

#[test]
fn without_further_roots_the_agents_roots_are_used() {
    let mut world = west(false);
    world.take_changes();
    assert!(!world.set_roots(&roots()[0]) && world.take_changes().is_empty());
    let made = compile(&world, &view()).0;
    assert_eq!(made.iter(Kind::Secret).count(), 0);
    for trust in trusts(&made) {
        assert_eq!(trust.name, "ROOTCA");
    }
}

/// gRPC clients have no roots by trust domain, so they accept no workload of another mesh.
#[test]
fn grpc_clients_accept_the_mesh_alone() {
    let mut world = west(true);
    world.set_roots(&roots()[0]);
    let grpc = ProxyView { role: Role::Grpc, ..view() };
    assert_eq!(compile(&world, &grpc).0.iter(Kind::Secret).count(), 0);
    let identities = std::collections::BTreeSet::from([skysail_core::SpiffeId::new("west", "shop", "db")]);
    let socket = tls::for_grpc(world.mesh(), &identities);
    let Some(core::transport_socket::ConfigType::TypedConfig(any)) = &socket.config_type else {
        panic!("{socket:?}")
    };
    let context: UpstreamTlsContext = unpack(any).unwrap();
    let text = format!("{context:?}");
    assert!(text.contains("spiffe://west/") && text.contains("spiffe://former/"), "{text}");
    assert!(!text.contains("spiffe://east/"), "{text}");
}
