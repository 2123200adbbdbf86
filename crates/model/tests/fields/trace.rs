//! Fields of a type, found by deserializing it from values that fit: serde tells the fields of each struct.

use std::{cell::RefCell, collections::HashMap, fmt};

use serde::{
    Deserialize,
    de::{self, DeserializeSeed, Deserializer, IntoDeserializer, Visitor, value::StrDeserializer},
    forward_to_deserialize_any,
};
use serde_json::{Value, json};

/// Maximum number of attempts to find values that fit.
const MAX_ATTEMPTS: usize = 10_000;

/// A field of a type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Traced {
    /// Path without list positions; `*` is any key of a mapping.
    pub(crate) path: String,
    /// Steps of the path that are lists: for each segment whether its value is a list.
    pub(crate) lists: Vec<bool>,
    /// What the field holds.
    pub(crate) holds: Holds,
}

/// Content of a field.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Holds {
    /// Fields, which follow.
    Fields,
    /// The same fields as another path, which precedes.
    Same(String),
    /// One of these words.
    Word(&'static [&'static str]),
    /// A value such as this one.
    Value(Value),
}

/// Returns the fields of a type in the order of their definition.
pub(crate) fn fields<T: for<'de> Deserialize<'de>>() -> Vec<Traced> {
    let mut choices = HashMap::new();
    for _ in 0..MAX_ATTEMPTS {
        let state = RefCell::new(State { choices, ..State::default() });
        let result = T::deserialize(Tracer { place: Place::default(), state: &state });
        let state = state.into_inner();
        match result {
            Ok(_) => return without_keys(state.fields),
            Err(error) => {
                let failed = state.last.unwrap_or_else(|| panic!("{error}"));
                choices = state.choices;
                *choices.entry(failed).or_default() += 1;
            }
        }
    }
    panic!("no values fit");
}

/// Returns the fields without those that stand for the keys and values of mappings to plain values.
fn without_keys(fields: Vec<Traced>) -> Vec<Traced> {
    let is_plain = |field: &Traced| matches!(field.holds, Holds::Value(_) | Holds::Word(_));
    let keyed: Vec<String> =
        fields.iter().filter(|field| !is_plain(field)).map(|field| field.path.clone()).collect();
    let kept = |field: &Traced| match field.path.strip_suffix(".*") {
        Some(_) => !is_plain(field),
        None => !keyed.contains(&format!("{}.*", field.path)),
    };
    fields.into_iter().filter(kept).collect()
}

#[derive(Default)]
struct State {
    fields: Vec<Traced>,
    /// Structs seen, and the path of each.
    structs: HashMap<&'static str, String>,
    /// Number of the value to offer at each path.
    choices: HashMap<String, usize>,
    /// Path at which a value was offered last.
    last: Option<String>,
}

/// A place in the type.
#[derive(Clone, Debug, Default)]
struct Place {
    path: String,
    lists: Vec<bool>,
}

#[derive(Clone)]
struct Tracer<'a> {
    place: Place,
    state: &'a RefCell<State>,
}

#[derive(Debug)]
struct TraceError(String);

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TraceError {}

impl de::Error for TraceError {
    fn custom<M: fmt::Display>(message: M) -> Self {
        Self(message.to_string())
    }
}

impl Tracer<'_> {
    fn child(&self, key: &str) -> Self {
        let mut place = self.place.clone();
        if !place.path.is_empty() {
            place.path.push('.');
        }
        place.path.push_str(key);
        place.lists.push(false);
        Self { place, state: self.state }
    }

    fn record(&self, holds: Holds) {
        let Place { path, lists } = self.place.clone();
        if !path.is_empty() {
            let fields = &mut self.state.borrow_mut().fields;
            // A list of values, or a mapping to values, is one field.
            fields.retain(|field| field.path != path);
            fields.push(Traced { path, lists, holds });
        }
    }
}

impl<'de> Deserializer<'de> for Tracer<'_> {
    type Error = TraceError;

    /// Offers one of several values, the next after each failure.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TraceError> {
        let choice = {
            let mut state = self.state.borrow_mut();
            state.last = Some(self.place.path.clone());
            state.choices.get(&self.place.path).copied().unwrap_or_default()
        };
        self.record(Holds::Value(json!([json!("10s"), json!(1), json!(true), json!({})][choice])));
        match choice {
            0 => visitor.visit_str("10s"),
            1 => visitor.visit_u64(1),
            2 => visitor.visit_bool(true),
            _ => visitor.visit_map(Entries { keys: [].iter(), next: None, parent: self }),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TraceError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, TraceError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TraceError> {
        let mut tracer = self;
        if let Some(last) = tracer.place.lists.last_mut() {
            *last = true;
        }
        visitor.visit_seq(Once(Some(tracer)))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TraceError> {
        self.record(Holds::Value(json!({"key": "value"})));
        visitor.visit_map(Entries { keys: ["*"].iter(), next: None, parent: self })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TraceError> {
        let seen = self.state.borrow().structs.get(name).cloned();
        if let Some(seen) = seen {
            self.record(Holds::Same(seen));
            return visitor.visit_map(Entries { keys: [].iter(), next: None, parent: self });
        }
        self.state.borrow_mut().structs.insert(name, self.place.path.clone());
        if fields.is_empty() {
            self.record(Holds::Value(json!({})));
        } else {
            self.record(Holds::Fields);
        }
        // A comparison has one of its fields only.
        let keys = if name == "StringMatch" { &fields[..0] } else { fields };
        for key in &fields[..fields.len() - keys.len()] {
            self.child(key).record(Holds::Value(json!("a")));
        }
        visitor.visit_map(Entries { keys: keys.iter(), next: None, parent: self })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, TraceError> {
        self.record(Holds::Word(variants));
        visitor.visit_enum(variants[0].into_deserializer())
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TraceError> {
        self.record(Holds::Value(json!({})));
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct identifier
    }
}

/// A list of one item.
struct Once<'a>(Option<Tracer<'a>>);

impl<'de> de::SeqAccess<'de> for Once<'_> {
    type Error = TraceError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, TraceError> {
        self.0.take().map(|tracer| seed.deserialize(tracer)).transpose()
    }
}

/// A mapping with these keys.
struct Entries<'a> {
    keys: std::slice::Iter<'static, &'static str>,
    next: Option<&'static str>,
    parent: Tracer<'a>,
}

impl<'de> de::MapAccess<'de> for Entries<'_> {
    type Error = TraceError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, TraceError> {
        // An old name with `_` is another name of a field.
        self.next = self.keys.find(|key| !key.contains('_')).copied();
        let key =
            self.next.map(|key| StrDeserializer::<TraceError>::new(if key == "*" { "key" } else { key }));
        key.map(|key| seed.deserialize(key)).transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, TraceError> {
        let key = self.next.ok_or_else(|| TraceError("value without a key".to_owned()))?;
        seed.deserialize(self.parent.child(key))
    }
}
