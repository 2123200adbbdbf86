//! Tokens and external authorizers.

use std::sync::Arc;

use skysail_core::names::UNFETCHED_KEY;
use skysail_xds::envoy::pb::envoy::extensions::filters::http::jwt_authn::v3::{
    JwtAuthentication, jwt_provider::JwksSourceSpecifier,
};

use super::*;
use crate::{KeySource, compile::jwt::NO_KEY};

const TOKENS: &str = r#"
apiVersion: security.istio.io/v1
kind: RequestAuthentication
metadata: {name: tokens, namespace: shop}
spec:
  jwtRules:
  - {issuer: a, jwksUri: 'https://keys.example.com/a'}
  - {issuer: 'https://b.example.com', fromCookies: [session]}
  - {issuer: c, jwks: '{"keys": [{"kty": "RSA"}]}'}
"#;

fn key_sets(world: &World) -> Vec<String> {
    let (made, _) = compile(world, &view());
    let chain = &chains(&made, 8080)[0];
    let managers = configs(chain).into_iter().filter_map(unpack::<HttpConnectionManager>);
    let mut filters = managers.flat_map(|manager| manager.http_filters);
    let filter = filters.find(|filter| filter.name.ends_with("jwt_authn")).unwrap();
    let Some(ConfigType::TypedConfig(any)) = filter.config_type else { panic!("no configuration") };
    let config: JwtAuthentication = unpack(&any).unwrap();
    let mut names: Vec<&String> = config.providers.keys().collect();
    names.sort();
    let set = |name: &&String| match &config.providers[*name].jwks_source_specifier {
        Some(JwksSourceSpecifier::LocalJwks(source)) => match &source.specifier {
            Some(core::data_source::Specifier::InlineString(keys)) => keys.clone(),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    };
    names.iter().map(set).collect()
}

#[test]
fn no_token_is_valid_until_the_key_set_is_known() {
    let mut world = world(TOKENS);
    assert_eq!([&key_sets(&world)[0], &key_sets(&world)[2]], [NO_KEY, NO_KEY]);
    let sources: Vec<KeySource> = world.key_fetches().into_keys().collect();
    let issuer = KeySource::Issuer("https://b.example.com".into());
    assert_eq!(sources, [KeySource::Uri("https://keys.example.com/a".into()), issuer.clone()]);
    world.take_changes();
    assert!(world.set_key_set(&issuer, Some(Arc::from("the set"))));
    let changes = world.take_changes();
    let other = ProxyView { namespace: "other".into(), ..view() };
    assert!(changes.affects_own(&view()) && !changes.affects_own(&other), "{changes:?}");
    assert_eq!([&key_sets(&world)[0], &key_sets(&world)[2]], [NO_KEY, "the set"]);
    assert!(!world.set_key_set(&issuer, Some(Arc::from("the set"))));
}

#[test]
fn the_placeholder_is_a_key_set() {
    assert!(crate::validate::key_set(NO_KEY).is_ok());
    assert!(NO_KEY.contains(&format!(r#""kid":"{UNFETCHED_KEY}""#)), "{NO_KEY}");
}
