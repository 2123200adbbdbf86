//! The part of Go's templates that test configurations of ClusterLoader2 use: variables, conditions, loops and
//! functions on numbers. Anything else is an error.

use std::collections::BTreeMap;

use anyhow::{Context as _, bail, ensure};
use serde_json::Value;

/// Maximum length of the result in bytes.
const MAX_OUTPUT: usize = 4 << 20;
/// Maximum number of rounds of a loop, and of parts that are rendered in all.
const MAX_ROUNDS: u64 = 10_000;
const MAX_PARTS: usize = 1_000_000;
/// Maximum depth of blocks and of parentheses.
const MAX_DEPTH: usize = 32;

/// Values that a template reads as `.Name`, and sets as `$name`.
#[derive(Clone, Debug, Default)]
pub(super) struct Variables(BTreeMap<String, Value>);

impl Variables {
    /// Parses the values of a command line as YAML does: numbers, `true`, `false`, or text.
    pub(super) fn of(texts: &BTreeMap<String, String>) -> Self {
        let value = |text: &String| serde_json::from_str(text).unwrap_or_else(|_| text.as_str().into());
        Self(texts.iter().map(|(name, text)| (format!(".{name}"), value(text))).collect())
    }

    /// Returns these values, and further ones that replace them.
    pub(super) fn with(&self, more: impl Iterator<Item = (String, Value)>) -> Self {
        let more = more.map(|(name, value)| (format!(".{name}"), value));
        Self(self.0.clone().into_iter().chain(more).collect())
    }
}

/// A template, parsed.
#[derive(Debug)]
pub(super) struct Template(Vec<Part>);

#[derive(Debug)]
enum Part {
    Text(String),
    Print(Expression),
    Set(String, Expression),
    /// Parts of the first condition that holds; the last condition may be a constant.
    If(Vec<(Expression, Vec<Part>)>),
    /// Parts for each item, with the item in the variable.
    Range(String, Expression, Vec<Part>),
}

#[derive(Debug)]
enum Expression {
    Constant(Value),
    /// `$name`, `.Name`, or `.` in a loop.
    Variable(String),
    Call(String, Vec<Expression>),
}

/// What ended a block.
enum BlockEnd {
    Text,
    End,
    Else(Option<Expression>),
}

impl Template {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        let mut parser = Parser { pieces: pieces(text)?.into_iter(), depth: 0 };
        let (parts, end) = parser.block()?;
        ensure!(matches!(end, BlockEnd::Text), "an `end` or `else` without a block");
        Ok(Self(parts))
    }

    pub(super) fn render(&self, variables: &Variables) -> anyhow::Result<String> {
        let mut run = Rendering { variables: variables.0.clone(), output: String::new(), parts: 0 };
        run.block(&self.0)?;
        Ok(run.output)
    }
}

/// A piece of the text: outside of braces, or the words within.
enum Piece {
    Outside(String),
    Action(Vec<String>),
}

/// Divides a text into its pieces.
fn pieces(text: &str) -> anyhow::Result<Vec<Piece>> {
    let (mut pieces, mut rest, mut trims) = (Vec::new(), text, false);
    loop {
        let (outside, action) = match rest.split_once("{{") {
            Some((outside, after)) => {
                let (action, after) = after.split_once("}}").context("`{{` without `}}`")?;
                rest = after;
                (outside, Some(action))
            }
            None => (rest, None),
        };
        let outside = if trims { outside.trim_start() } else { outside };
        let Some(action) = action else {
            pieces.push(Piece::Outside(outside.to_owned()));
            return Ok(pieces);
        };
        let opened = action.strip_prefix('-');
        let outside = if opened.is_some() { outside.trim_end() } else { outside };
        let action = opened.unwrap_or(action);
        let closed = action.strip_suffix('-');
        trims = closed.is_some();
        let action = closed.unwrap_or(action).trim();
        pieces.push(Piece::Outside(outside.to_owned()));
        if !action.starts_with("/*") {
            pieces.push(Piece::Action(words(action)?));
        }
    }
}

/// Divides an action into words. Texts begin with a quotation mark.
fn words(action: &str) -> anyhow::Result<Vec<String>> {
    let (mut words, mut rest) = (Vec::new(), action.trim_start());
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '"' | '`' => {
                let end = rest[1..].find(first).with_context(|| format!("{action}: a text has no end"))?;
                ensure!(first == '`' || !rest[1..=end].contains('\\'), "{action}: escapes are not supported");
                words.push(format!("\"{}", &rest[1..=end]));
                end + 2
            }
            '(' | ')' => {
                words.push(first.to_string());
                1
            }
            '|' => {
                words.push("|".to_owned());
                1
            }
            _ => {
                let ends = |c: char| c.is_whitespace() || "()\"`|".contains(c);
                let length = rest.find(ends).unwrap_or(rest.len());
                // A name and `:=` need no space between them.
                let length = rest[..length].find(":=").filter(|at| *at > 0).unwrap_or(length);
                words.push(rest[..length].to_owned());
                length
            }
        };
        rest = rest[length..].trim_start();
    }
    Ok(words)
}

struct Parser {
    pieces: std::vec::IntoIter<Piece>,
    depth: usize,
}

impl Parser {
    /// Parses parts up to the end of the block.
    fn block(&mut self) -> anyhow::Result<(Vec<Part>, BlockEnd)> {
        self.depth += 1;
        ensure!(self.depth <= MAX_DEPTH, "more than {MAX_DEPTH} blocks in each other");
        let mut parts = Vec::new();
        let end = loop {
            let words = match self.pieces.next() {
                None => break BlockEnd::Text,
                Some(Piece::Outside(text)) => {
                    parts.push(Part::Text(text));
                    continue;
                }
                Some(Piece::Action(words)) => words,
            };
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            match words[..] {
                [] => {}
                ["end"] => break BlockEnd::End,
                ["else"] => break BlockEnd::Else(None),
                ["else", "if", ref condition @ ..] => break BlockEnd::Else(Some(expression(condition)?)),
                ["if", ref condition @ ..] => parts.push(self.conditions(expression(condition)?)?),
                ["range", variable, ":=", ref list @ ..] => {
                    let list = expression(list)?;
                    parts.push(Part::Range(variable.to_owned(), list, self.body()?));
                }
                ["range", ref list @ ..] => {
                    let list = expression(list)?;
                    parts.push(Part::Range(".".to_owned(), list, self.body()?));
                }
                [variable, ":=" | "=", ref value @ ..] if variable.starts_with('$') => {
                    parts.push(Part::Set(variable.to_owned(), expression(value)?));
                }
                ref printed => parts.push(Part::Print(expression(printed)?)),
            }
        };
        self.depth -= 1;
        Ok((parts, end))
    }

    /// Parses the parts of a loop.
    fn body(&mut self) -> anyhow::Result<Vec<Part>> {
        match self.block()? {
            (parts, BlockEnd::End) => Ok(parts),
            _ => bail!("a `range` without its `end`"),
        }
    }

    /// Parses the parts of a condition and of those after it.
    fn conditions(&mut self, mut condition: Expression) -> anyhow::Result<Part> {
        let mut branches = Vec::new();
        loop {
            let (parts, end) = self.block()?;
            branches.push((condition, parts));
            condition = match end {
                BlockEnd::End => return Ok(Part::If(branches)),
                BlockEnd::Else(next) => next.unwrap_or(Expression::Constant(true.into())),
                BlockEnd::Text => bail!("an `if` without its `end`"),
            };
        }
    }
}

/// Parses an expression: an operand, or a function with operands.
fn expression(words: &[&str]) -> anyhow::Result<Expression> {
    let mut parsed: Option<Expression> = None;
    for mut stage in words.split(|word| *word == "|") {
        let whole = stage;
        let mut next = call(&mut stage, 0)?;
        ensure!(stage.is_empty(), "{}: `)` without `(`", whole.join(" "));
        // The value of a stage is the last operand of the next.
        if let Some(value) = parsed.take() {
            match &mut next {
                Expression::Call(_, operands) => operands.push(value),
                _ => bail!("{}: a stage after `|` is not a function", whole.join(" ")),
            }
        }
        parsed = Some(next);
    }
    parsed.context("an expression is empty")
}

/// Parses up to the end or a closing parenthesis.
fn call(rest: &mut &[&str], depth: usize) -> anyhow::Result<Expression> {
    ensure!(depth < MAX_DEPTH, "more than {MAX_DEPTH} parentheses in each other");
    let is_function =
        |word: &&str| word.starts_with(|c: char| c.is_ascii_alphabetic()) && constant(word).is_none();
    let function = rest.first().filter(|word| is_function(word)).map(|word| (*word).to_owned());
    if function.is_some() {
        *rest = &rest[1..];
    }
    let mut operands = Vec::new();
    while let Some((word, after)) = rest.split_first() {
        match *word {
            ")" => break,
            "(" => {
                *rest = after;
                operands.push(call(rest, depth + 1)?);
                ensure!(rest.first() == Some(&")"), "`(` without `)`");
                *rest = &rest[1..];
            }
            word => {
                *rest = after;
                operands.push(operand(word)?);
            }
        }
    }
    match (function, operands.len()) {
        (Some(function), _) => Ok(Expression::Call(function, operands)),
        (None, 1) => Ok(operands.remove(0)),
        (None, count) => bail!("{count} values where one is expected"),
    }
}

/// Returns the value of a word that is a constant.
fn constant(word: &str) -> Option<Value> {
    match word {
        "nil" => Some(Value::Null),
        "true" | "false" => Some((word == "true").into()),
        _ => None,
    }
}

fn operand(word: &str) -> anyhow::Result<Expression> {
    if let Some(value) = constant(word) {
        return Ok(Expression::Constant(value));
    }
    if let Some(text) = word.strip_prefix('"') {
        return Ok(Expression::Constant(text.into()));
    }
    if word.starts_with(['$', '.']) && !word[1..].contains('.') {
        return Ok(Expression::Variable(word.to_owned()));
    }
    match serde_json::from_str(word) {
        Ok(value @ Value::Number(_)) => Ok(Expression::Constant(value)),
        _ => bail!("{word}: this part of a template is not supported"),
    }
}

struct Rendering {
    variables: BTreeMap<String, Value>,
    output: String,
    parts: usize,
}

impl Rendering {
    fn block(&mut self, parts: &[Part]) -> anyhow::Result<()> {
        for part in parts {
            self.parts += 1;
            ensure!(self.parts <= MAX_PARTS, "the template has more than {MAX_PARTS} parts");
            match part {
                Part::Text(text) => self.output.push_str(text),
                Part::Print(value) => match self.value(value)? {
                    Value::String(text) => self.output.push_str(&text),
                    other => self.output.push_str(&other.to_string()),
                },
                Part::Set(name, value) => {
                    let value = self.value(value)?;
                    self.variables.insert(name.clone(), value);
                }
                Part::If(branches) => {
                    for (condition, parts) in branches {
                        if is_true(&self.value(condition)?) {
                            self.block(parts)?;
                            break;
                        }
                    }
                }
                Part::Range(name, list, parts) => {
                    let items = match self.value(list)? {
                        Value::Null => Vec::new(),
                        Value::Array(items) => items,
                        other => bail!("range {other}: not a list"),
                    };
                    for item in items {
                        self.variables.insert(name.clone(), item);
                        self.block(parts)?;
                    }
                }
            }
            ensure!(self.output.len() <= MAX_OUTPUT, "the template renders more than {MAX_OUTPUT} bytes");
        }
        Ok(())
    }

    fn value(&self, expression: &Expression) -> anyhow::Result<Value> {
        match expression {
            Expression::Constant(value) => Ok(value.clone()),
            Expression::Variable(name) if name.starts_with('$') => {
                self.variables.get(name).cloned().with_context(|| format!("{name} is not set"))
            }
            Expression::Variable(name) => Ok(self.variables.get(name).cloned().unwrap_or_default()),
            Expression::Call(function, operands) => {
                let values: Vec<Value> =
                    operands.iter().map(|one| self.value(one)).collect::<Result<_, _>>()?;
                apply(function, &values).with_context(|| format!("function {function}"))
            }
        }
    }
}

fn is_true(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(value) => *value,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
    }
}

/// Applies a function of Go's templates or of ClusterLoader2.
fn apply(function: &str, values: &[Value]) -> anyhow::Result<Value> {
    let number = |value: &Value| value.as_f64().with_context(|| format!("{value} is not a number"));
    let fold = |combine: fn(f64, f64) -> f64| -> anyhow::Result<f64> {
        let (first, rest) = values.split_first().context("no operands")?;
        rest.iter().try_fold(number(first)?, |sum, value| Ok(combine(sum, number(value)?)))
    };
    // As Go converts: towards zero.
    #[expect(clippy::cast_possible_truncation, reason = "checked against the bounds of i64")]
    let whole = |value: f64| -> anyhow::Result<Value> {
        ensure!(value.is_finite() && value.abs() < 9e15, "{value} is too large");
        Ok((value as i64).into())
    };
    let two = || {
        <[&Value; 2]>::try_from(values.iter().collect::<Vec<_>>()).ok().context("two operands are expected")
    };
    let compare = |holds: fn(f64, f64) -> bool| -> anyhow::Result<Value> {
        let [a, b] = two()?;
        Ok(holds(number(a)?, number(b)?).into())
    };
    match function {
        "DefaultParam" => Ok(values.iter().find(|value| !value.is_null()).cloned().unwrap_or_default()),
        "AddInt" => whole(fold(|a, b| a + b)?),
        "SubtractInt" => whole(fold(|a, b| a - b)?),
        "MultiplyInt" => whole(fold(|a, b| a * b)?),
        "DivideInt" => whole(fold(|a, b| a / b)?),
        "MaxInt" => whole(fold(f64::max)?),
        "MinInt" => whole(fold(f64::min)?),
        "AddFloat" => Ok(fold(|a, b| a + b)?.into()),
        "SubtractFloat" => Ok(fold(|a, b| a - b)?.into()),
        "MultiplyFloat" => Ok(fold(|a, b| a * b)?.into()),
        "DivideFloat" => Ok(fold(|a, b| a / b)?.into()),
        "MaxFloat" => Ok(fold(f64::max)?.into()),
        "MinFloat" => Ok(fold(f64::min)?.into()),
        "Loop" => {
            let rounds = values.first().and_then(Value::as_u64).filter(|rounds| *rounds <= MAX_ROUNDS);
            let rounds = rounds.with_context(|| format!("not a number from 0 to {MAX_ROUNDS}"))?;
            Ok((0..rounds).collect())
        }
        "YamlQuote" => Ok(values.first().map(|value| value.to_string()).unwrap_or_default().into()),
        // A size does not depend on chance: the mean.
        "RandIntRange" => whole((fold(|a, b| a + b)? / 2.0).trunc()),
        "IfThenElse" => match values {
            [condition, then, otherwise] => Ok(if is_true(condition) { then } else { otherwise }.clone()),
            _ => bail!("three operands are expected"),
        },
        "and" => Ok(values.iter().all(is_true).into()),
        "or" => Ok(values.iter().any(is_true).into()),
        "not" => Ok((!values.iter().any(is_true)).into()),
        "eq" | "ne" => {
            let [a, b] = two()?;
            let is_equal = a == b || a.as_f64().is_some_and(|a| Some(a) == b.as_f64());
            Ok((is_equal == (function == "eq")).into())
        }
        "lt" => compare(|a, b| a < b),
        "le" => compare(|a, b| a <= b),
        "gt" => compare(|a, b| a > b),
        "ge" => compare(|a, b| a >= b),
        _ => bail!("it is not supported"),
    }
}
