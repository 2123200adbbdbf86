//! Packed messages with maps, with the same bytes every time.
//!
//! prost keeps maps in hash maps and writes them in any order. Many tools compare packed messages as bytes, and so does
//! Envoy when it decides whether a filter changed. Concatenated encodings of the parts of a message are an encoding of
//! the whole (Protocol Buffers, "Last One Wins"). Maps are therefore written entry by entry.

use std::collections::BTreeMap;

use prost::{Message, Name};
use skysail_proto::Codec;

use super::{
    order,
    pb::{Any, Struct, Value, rbac},
};

/// A message with only its first field. The field is optional so that an empty one is written too: rules without
/// policies deny everything, absent rules nothing.
#[derive(Clone, PartialEq, Message)]
struct FirstField {
    #[prost(bytes = "vec", optional, tag = "1")]
    field: Option<Vec<u8>>,
}

/// A message with only its second field.
#[derive(Clone, PartialEq, Message)]
struct SecondField {
    #[prost(bytes = "vec", optional, tag = "2")]
    field: Option<Vec<u8>>,
}

/// Packs a message.
pub(super) fn pack<M: Codec + Name>(message: &M) -> Any {
    of_type::<M>(message.to_vec())
}

/// Packs the bytes of a message.
pub(super) fn of_type<M: Codec + Name>(body: Vec<u8>) -> Any {
    Any { type_url: M::type_url(), value: order::in_go_order(&M::full_name(), body) }
}

/// Packs a `udpa.type.v1.TypedStruct`.
pub(super) fn typed_struct(type_url: &str, fields: BTreeMap<&str, Value>) -> Any {
    let mut body = FirstField { field: Some(type_url.as_bytes().to_vec()) }.encode_to_vec();
    body.extend(SecondField { field: Some(structure(fields)) }.encode_to_vec());
    Any { type_url: "type.googleapis.com/udpa.type.v1.TypedStruct".into(), value: body }
}

/// Packs a filter whose first field is its rules and whose second field is its shadow rules.
pub(super) fn with_rules<M: Codec + Name>(
    rest: &M,
    rules: Option<&RbacRules>,
    shadow: Option<&RbacRules>,
) -> Any {
    let mut body = FirstField { field: rules.map(RbacRules::encode) }.encode_to_vec();
    body.extend(SecondField { field: shadow.map(RbacRules::encode) }.encode_to_vec());
    body.extend(rest.to_vec());
    of_type::<M>(body)
}

/// `envoy.config.rbac.v3.RBAC` with its policies in order.
#[derive(Clone, Debug)]
pub(super) struct RbacRules {
    pub(super) action: rbac::rbac::Action,
    pub(super) policies: BTreeMap<String, rbac::Policy>,
}

impl RbacRules {
    fn encode(&self) -> Vec<u8> {
        let head = rbac::Rbac { action: self.action as i32, ..Default::default() };
        let mut body = head.to_vec();
        for (name, policy) in &self.policies {
            let policies = [(name.clone(), policy.clone())].into();
            body.extend(rbac::Rbac { policies, ..Default::default() }.to_vec());
        }
        body
    }
}

fn structure(fields: BTreeMap<&str, Value>) -> Vec<u8> {
    let parts = fields.into_iter().map(|(name, value)| Struct { fields: [(name.to_owned(), value)].into() });
    parts.flat_map(|part| part.to_vec()).collect()
}

#[cfg(test)]
mod tests {
    use skysail_xds::{
        envoy::pb::envoy::extensions::filters::http::rbac::v3::Rbac,
        istio::{TypedStruct, string},
    };

    use super::*;

    #[test]
    fn concatenated_parts_decode_as_the_whole() {
        let fields = BTreeMap::from([("a", string("1")), ("b", string("2"))]);
        let read = TypedStruct::decode(typed_struct("x", fields).value.as_slice()).unwrap();
        assert_eq!(read.type_url, "x");
        assert_eq!(read.value.unwrap().fields.len(), 2);

        let policies = ["p", "q"].map(|name| (name.to_owned(), rbac::Policy::default())).into();
        let rules = RbacRules { action: rbac::rbac::Action::Deny, policies };
        let rest = Rbac { shadow_rules_stat_prefix: "s".into(), ..Default::default() };
        let read = Rbac::decode(with_rules(&rest, Some(&rules), None).value.as_slice()).unwrap();
        assert_eq!(read.shadow_rules_stat_prefix, "s");
        let rules = read.rules.unwrap();
        assert_eq!(rules.action, rbac::rbac::Action::Deny as i32);
        assert_eq!(rules.policies.len(), 2);
    }

    #[test]
    fn rules_without_policies_are_still_rules() {
        let rules = RbacRules { action: rbac::rbac::Action::Allow, policies: BTreeMap::new() };
        let read = Rbac::decode(with_rules(&Rbac::default(), Some(&rules), None).value.as_slice()).unwrap();
        assert_eq!(read.rules, Some(rbac::Rbac::default()));
    }
}
