//! Looks names up at one name server, written anew so that tests do not take our own code's word for it.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use tokio::net::UdpSocket;
use tokio::time::timeout;

/// Where the names of workspaces are answered.
const RESPONDER: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::new(0xfd60, 0x627a, 0xa42b, 0, 0, 0, 0, 0x53)), 53);
/// A question is repeated after so long: the device may just have come up.
const REPEAT: Duration = Duration::from_millis(100);

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lookup {
    A,
    Aaaa,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// 0 is success, 3 NXDOMAIN.
    pub code: u8,
    pub v4: Vec<Ipv4Addr>,
    pub v6: Vec<Ipv6Addr>,
}

/// Asks our responder for the IPv6 addresses of `name`.
pub async fn ask(name: &str) -> anyhow::Result<Answer> {
    ask_for(RESPONDER, name, Lookup::Aaaa).await
}

/// Asks `server`, again and again until it answers.
pub async fn ask_for(server: SocketAddr, name: &str, lookup: Lookup) -> anyhow::Result<Answer> {
    let query = query(name, lookup)?;
    let asked = async {
        loop {
            if let Ok(Ok(answer)) = timeout(REPEAT, once(server, &query)).await {
                return parse(&answer);
            }
            // A device that is not there refuses at once.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(super::PATIENCE, asked).await.with_context(|| format!("{server} does not answer for {name}"))?
}

/// Asks our responder until `name` has an address, and says which and how long that took.
pub async fn await_answer(name: &str) -> anyhow::Result<(Ipv6Addr, Duration)> {
    let begin = Instant::now();
    loop {
        if let Some(address) = ask(name).await?.v6.first() {
            return Ok((*address, begin.elapsed()));
        }
        ensure!(begin.elapsed() < super::PATIENCE, "{name} does not resolve");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn once(server: SocketAddr, query: &[u8]) -> anyhow::Result<Vec<u8>> {
    let any: SocketAddr = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse()?;
    let socket = UdpSocket::bind(any).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut answer = vec![0; 4096];
    let length = socket.recv(&mut answer).await?;
    answer.truncate(length);
    Ok(answer)
}

fn query(name: &str, lookup: Lookup) -> anyhow::Result<Vec<u8>> {
    let mut message = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in name.trim_end_matches('.').split('.') {
        message.push(u8::try_from(label.len())?);
        message.extend(label.as_bytes());
    }
    message.extend([0, 0, if lookup == Lookup::A { 1 } else { 28 }, 0, 1]);
    Ok(message)
}

fn parse(message: &[u8]) -> anyhow::Result<Answer> {
    let mut reader = Reader { message, at: 0 };
    ensure!(reader.u16()? == 0x1234, "an answer to another question");
    let code = (reader.u16()? & 0xf) as u8;
    let (questions, records) = (reader.u16()?, reader.u16()?);
    reader.take(4)?;
    for _ in 0..questions {
        reader.skip_name()?;
        reader.take(4)?;
    }
    let mut answer = Answer { code, v4: Vec::new(), v6: Vec::new() };
    for _ in 0..records {
        reader.skip_name()?;
        let kind = reader.u16()?;
        reader.take(6)?;
        let length = reader.u16()?;
        let data = reader.take(length.into())?;
        match kind {
            1 => answer.v4.push(<[u8; 4]>::try_from(data)?.into()),
            28 => answer.v6.push(<[u8; 16]>::try_from(data)?.into()),
            _ => {}
        }
    }
    Ok(answer)
}

struct Reader<'a> {
    message: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> anyhow::Result<&'a [u8]> {
        let found = self.message.get(self.at..self.at + length).context("a DNS message is cut short")?;
        self.at += length;
        Ok(found)
    }

    fn u16(&mut self) -> anyhow::Result<u16> {
        Ok(u16::from_be_bytes(self.take(2)?.try_into()?))
    }

    fn skip_name(&mut self) -> anyhow::Result<()> {
        loop {
            match self.take(1)?[0] {
                0 => return Ok(()),
                pointer if pointer >= 0xc0 => return self.take(1).map(drop),
                length => drop(self.take(length.into())?),
            }
        }
    }
}
