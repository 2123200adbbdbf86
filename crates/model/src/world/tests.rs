use super::*;

#[test]
fn an_empty_world_has_istios_defaults() {
    assert_eq!(World::new().mesh().root_namespace, "istio-system");
}
