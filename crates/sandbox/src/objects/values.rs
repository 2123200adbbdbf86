//! Content of ConfigMaps and Secrets.

use std::collections::BTreeMap;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde_json::Value;

use super::{Labels, field};

/// Content of a ConfigMap or a Secret.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Values {
    /// `data` and `stringData`, decoded.
    pub(crate) data: Data,
    /// `binaryData` of a ConfigMap, decoded; used by volumes only.
    pub(crate) binary: Data,
}

/// Content by key.
pub(crate) type Data = BTreeMap<String, Vec<u8>>;

/// Maximum size of a ConfigMap or a Secret, in bytes. Source: Kubernetes' `MaxSecretSize`.
const MAX_SIZE: usize = 1 << 20;

impl Values {
    /// Reads the content of a ConfigMap or a Secret, within the limits of the API server.
    pub(super) fn read(object: &Value) -> Result<Self, String> {
        let plain = |texts: Labels| -> Data {
            texts.into_iter().map(|(key, text)| (key, text.into_bytes())).collect()
        };
        let decoded = |name: &str| -> Result<Data, String> {
            let bytes = |(key, text): (String, String)| {
                // A multi-line YAML value contains line breaks.
                let text: String = text.split_whitespace().collect();
                let bytes = BASE64.decode(text).map_err(|error| format!("{name}.{key}: {error}"))?;
                Ok((key, bytes))
            };
            field::<Labels>(object, name)?.into_iter().map(bytes).collect()
        };
        let values = if object["kind"] == "Secret" {
            let mut data = decoded("data")?;
            data.extend(plain(field(object, "stringData")?));
            Self { data, binary: Data::new() }
        } else {
            Self { data: plain(field(object, "data")?), binary: decoded("binaryData")? }
        };
        let all = || values.data.iter().chain(&values.binary);
        if let Some((key, _)) = all().find(|(key, _)| !is_key(key)) {
            return Err(format!("{key:?} is not a key: use letters, digits, '-', '_' and '.'"));
        }
        let size: usize = all().map(|(key, bytes)| key.len() + bytes.len()).sum();
        if size > MAX_SIZE {
            return Err(format!("it holds {size} bytes, and {MAX_SIZE} are allowed"));
        }
        Ok(values)
    }
}

/// Returns whether this is a valid key of a ConfigMap or a Secret. Source: Kubernetes' `IsConfigMapKey`.
fn is_key(key: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=253).contains(&key.len()) && key.bytes().all(allowed) && key != "." && !key.starts_with("..")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn contents_are_decoded() {
        let secret = json!({ "kind": "Secret", "data": { "a": "c2Vj\ncmV0", "b": "b" }, "stringData": { "b": "two" } });
        assert!(Values::read(&secret).unwrap_err().starts_with("data.b: "));
        let secret = json!({ "kind": "Secret", "data": { "a": "c2Vj\ncmV0", "b": "/w==" }, "stringData": { "b": "two" } });
        let values = Values::read(&secret).unwrap();
        assert_eq!((&values.data["a"][..], &values.data["b"][..]), (&b"secret"[..], &b"two"[..]));
        let map = json!({ "kind": "ConfigMap", "data": { "a": "1" }, "binaryData": { "b": "/w==" } });
        let values = Values::read(&map).unwrap();
        assert_eq!((&values.data["a"][..], &values.binary["b"][..]), (&b"1"[..], &[0xff][..]));
    }

    #[test]
    fn keys_and_sizes_have_the_limits_of_the_api_server() {
        for key in ["", ".", "..", "..data", "a/b", "../a", "a b", &"a".repeat(254)] {
            let error = Values::read(&json!({ "kind": "ConfigMap", "data": { key: "" } })).unwrap_err();
            assert!(error.contains("is not a key"), "{error}");
        }
        let sized = |size: usize| {
            Values::read(&json!({ "kind": "ConfigMap", "data": { ".a-b_c": "x".repeat(size) } }))
        };
        assert!(sized(MAX_SIZE - 6).is_ok());
        assert!(sized(MAX_SIZE - 5).unwrap_err().contains("are allowed"));
    }
}
