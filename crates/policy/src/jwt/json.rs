//! JSON without duplicate names. An object with a duplicate name is refused, because readers differ in which value
//! they take.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Parses an object.
///
/// # Errors
///
/// The text is not JSON or not an object, or has a duplicate name at any depth.
pub(super) fn object(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    match serde_json::from_slice(bytes)? {
        UniqueNames(object @ Value::Object(_)) => Ok(object),
        UniqueNames(_) => Err(Error::custom("not an object")),
    }
}

/// A value without duplicate names.
struct UniqueNames(Value);

impl<'de> Deserialize<'de> for UniqueNames {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reader).map(Self)
    }
}

struct Reader;

impl<'de> Visitor<'de> for Reader {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, is: bool) -> Result<Value, E> {
        Ok(Value::Bool(is))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(number.into())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Value, E> {
        Number::from_f64(number).map(Value::Number).ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(text.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(UniqueNames(value)) = from.next_element()? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((name, UniqueNames(value))) = from.next_entry::<String, UniqueNames>()? {
            if object.insert(name, value).is_some() {
                return Err(A::Error::custom("a duplicate name"));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_with_duplicate_names_are_refused() {
        let text = r#"{"a": [1, -2, 3.5, true, null, "b\u0041"], "c": {"a": {}}}"#;
        assert_eq!(object(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for text in [r#"{"a": 1, "a": 1}"#, r#"{"b": [{"a": 1, "\u0061": 2}]}"#, "[]", "1", "{} {}", ""] {
            assert!(object(text.as_bytes()).is_err(), "{text}");
        }
    }
}
