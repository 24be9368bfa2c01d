//! What is held here: the DR rules of `control-plane.md` 4 and its vectors 9.4 to 9.10, byte for byte where we write.

use std::sync::Arc;
use std::time::Duration;

use codervpn_proto::tailnet::{self as pb, calls};
use codervpn_wire::drpc::{CallError, Kind, Packet, PacketReader, PacketWriter};
use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio::time::timeout;
use uuid::Uuid;

use super::{Client, RpcError, ServerCall, Service, serve};
use crate::mux::{Connection, MuxStream};
use crate::tailnet::TailnetClient;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

const OWNER: Uuid = Uuid::from_u128(0x00112233_4455_6677_8899_aabbccddeeff);
const AGENT: Uuid = Uuid::from_u128(0xaaaaaaaa_bbbb_cccc_dddd_eeeeeeeeeeee);

/// A client of ours and the bare session of a server.
fn pair(pipe: usize) -> (Connection, Connection) {
    let (a, b) = duplex(pipe);
    let (client, driver) = Connection::client(a);
    tokio::spawn(driver);
    let (server, driver) = Connection::server(b);
    tokio::spawn(driver);
    (client, server)
}

async fn bytes(stream: &mut MuxStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).await.unwrap();
    bytes
}

/// 9.4: Invoke and Message, then CloseSend; 9.5 as answer, in two splittings; Close and FIN at the end.
#[tokio::test(start_paused = true)]
async fn workspace_updates_call_by_the_vectors() {
    for split in [1, 1000] {
        let (client, server) = pair(1 << 16);
        let call = tokio::spawn(async move { TailnetClient::new(client).workspace_updates(OWNER).await });
        let mut stream = server.accept().await.unwrap();
        let call_bytes =
            hex("0301012a2f636f6465722e7461696c6e65742e76322e5461696c6e65742f576f726b7370616365557064617465730501
            02120a1000112233445566778899aabbccddeeff0d010300");
        assert_eq!(bytes(&mut stream, call_bytes.len()).await, call_bytes);
        let mut updates = call.await.unwrap().unwrap();
        let answer = hex(
            "050101470a190a101111111122223333444455555555555512036465761803122a0a10aaaaaaaabbbbccccddddeeeeeeeeeeee
            12046d61696e1a1011111111222233334444555555555555",
        );
        for part in answer.chunks(split) {
            stream.write_all(part).await.unwrap();
        }
        let update = updates.next().await.unwrap().unwrap();
        assert_eq!(update.upserted_workspaces[0].name, "dev");
        assert_eq!(update.upserted_agents[0].id, AGENT.as_bytes());
        // The empty snapshot and a message with an unknown field 100 (TR-56), then the server's CloseSend.
        stream.write_all(&hex("05010200 05010304a20601ff 0d010400")).await.unwrap();
        assert_eq!(updates.next().await.unwrap(), Some(pb::WorkspaceUpdate::default()));
        assert_eq!(updates.next().await.unwrap(), Some(pb::WorkspaceUpdate::default()));
        assert_eq!(updates.next().await.unwrap(), None);
        updates.close().await.unwrap();
        updates.close().await.unwrap();
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, hex("0b010400"));
    }
}

/// 9.6: every request that is not random.
#[tokio::test(start_paused = true)]
async fn coordinate_requests_by_the_vectors() {
    let (client, server) = pair(1 << 16);
    let (mut writer, mut reader) = TailnetClient::new(client).coordinate().unwrap();
    let mut stream = server.accept().await.unwrap();
    writer.add_tunnel(AGENT);
    writer.flush().await.unwrap();
    let first = hex("030101242f636f6465722e7461696c6e65742e76322e5461696c6e65742f436f6f7264696e617465
        050102141a120a10aaaaaaaabbbbccccddddeeeeeeeeeeee");
    assert_eq!(bytes(&mut stream, first.len()).await, first);
    writer.ready_for_handshake(&[OWNER]);
    writer.remove_tunnel(AGENT);
    writer.disconnect();
    writer.flush().await.unwrap();
    let then = hex("050103142a120a1000112233445566778899aabbccddeeff 0501041422120a10aaaaaaaabbbbccccddddeeeeeeeeeeee
        050105021200");
    assert_eq!(bytes(&mut stream, then.len()).await, then);
    // Error response, Close, FIN of the server: the message first, then the end, then our FIN without a Close.
    stream
        .write_all(&hex(
            "05010127 12 25 70656572204944206f7665727772697474656e206279206e657720636f6e6e656374696f6e 0b010200",
        ))
        .await
        .unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(reader.next().await.unwrap().unwrap().error, "peer ID overwritten by new connection");
    assert_eq!(reader.next().await.unwrap(), None);
    writer.add_tunnel(OWNER);
    assert_eq!(writer.flush().await, Err(RpcError::Ended));
    writer.finish();
    assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0);
}

/// 9.6 y_upd: the node of the vectors, but for the time, which we take ourselves (ND-8).
#[tokio::test(start_paused = true)]
async fn update_self_by_the_vector_and_never_without_a_home() {
    let (client, server) = pair(1 << 16);
    let (mut writer, _reader) = TailnetClient::new(client).coordinate().unwrap();
    let mut stream = server.accept().await.unwrap();
    let y_upd = hex("0501039e020a9b020a980208ef9baf8589cf959a12120c08a5facdac061088eadcc302
        1a226e70000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f2249646973636f6b65793a3230
        323132323233323432353236323732383239326132623263326432653266333033313332333333343335333633373338
        333933613362336333643365336628e70732110a063939392d7634119a9999999999993f4228666436303a363237613a
        613432623a343730383a383930613a6230633a6430653a6631302f3132384a28666436303a363237613a613432623a34
        3730383a383930613a6230633a6430653a6631302f31323852113230332e302e3131332e373a34313634315212313932
        2e3136382e312e31303a3431363431");
    let mut packets = PacketReader::new();
    let packet = packets.read(&mut y_upd.as_slice()).unwrap().unwrap();
    let request: pb::CoordinateRequest = prost::Message::decode(packet.data.as_slice()).unwrap();
    let message = request.update_self.unwrap().node.unwrap();
    let (mut node, left_out) = crate::convert::node_from_proto(message.clone()).unwrap();
    assert_eq!(left_out, 0);
    assert_eq!(crate::convert::node_to_proto(&node), message);

    let home = node.home.take();
    assert!(!writer.update_self(&node), "ND-4");
    node.home = home;
    assert!(writer.update_self(&node));
    writer.flush().await.unwrap();
    let mut input = bytes(&mut stream, 40).await;
    let mut packets = PacketReader::new();
    assert_eq!(packets.read(&mut input.as_slice()).unwrap().unwrap().kind, Kind::Invoke);
    input = bytes(&mut stream, 1).await;
    let packet = loop {
        if let Some(packet) = packets.read(&mut input.as_slice()).unwrap() {
            break packet;
        }
        input = bytes(&mut stream, 1).await;
    };
    let request: pb::CoordinateRequest = prost::Message::decode(packet.data.as_slice()).unwrap();
    let mut sent = request.update_self.unwrap().node.unwrap();
    assert_ne!(sent.as_of, message.as_of);
    assert_eq!(sent.as_of.as_ref().unwrap().nanos % 1000, 0);
    sent.as_of = message.as_of;
    assert_eq!(sent, message);
}

/// 9.8 and DR-12: one frame, complete on the Message alone.
#[tokio::test(start_paused = true)]
async fn tr_39_refresh_by_the_vectors_without_close_send() {
    let (client, server) = pair(1 << 16);
    let call = tokio::spawn(async move { TailnetClient::new(client).refresh_resume_token().await });
    let mut stream = server.accept().await.unwrap();
    let y_rt_call = hex("0301012c2f636f6465722e7461696c6e65742e76322e5461696c6e65742f526566726573
        68526573756d65546f6b656e050102000d010300");
    assert_eq!(bytes(&mut stream, y_rt_call.len()).await, y_rt_call);
    stream.write_all(&hex("0501011a0a0a746f6b2e656e2e736967120408c0d1021a0608a59dd3ac06")).await.unwrap();
    let answer = call.await.unwrap().unwrap();
    assert_eq!((answer.token.as_str(), answer.refresh_in.unwrap().seconds), ("tok.en.sig", 43_200));
    assert_eq!(bytes(&mut stream, 4).await, hex("0b010400"));
}

/// 9.9, DR-18: both ways of having no such call; after an Error the client ends with FIN alone.
#[tokio::test(start_paused = true)]
async fn tr_24_unimplemented_is_recognised() {
    for error in [
        "07010153000000000000000070726f746f636f6c206572726f723a20756e6b6e6f776e207270633a20222f636f6465722e7461696c6e65
         742e76322e5461696c6e65742f52656672657368526573756d65546f6b656e22",
        "07010115000000000000000c556e696d706c656d656e746564",
    ] {
        let (client, server) = pair(1 << 16);
        let call = tokio::spawn(async move { TailnetClient::new(client).refresh_resume_token().await });
        let mut stream = server.accept().await.unwrap();
        bytes(&mut stream, 56).await;
        stream.write_all(&hex(error)).await.unwrap();
        assert!(call.await.unwrap().unwrap_err().is_unimplemented());
        assert_eq!(stream.read(&mut [0; 10]).await.unwrap(), 0);
    }
}

/// DR-19, TR-40: every kind of garbage ends this call, and the next one works.
#[tokio::test(start_paused = true)]
async fn hostile_packets_end_the_call_only() {
    let hostile = [
        ("eleven-byte varint", "05ffffffffffffffffffffff"),
        ("length of 2^63", "050101ffffffffffffffffff7f"),
        ("4 MiB and one", "05010181808002"),
        ("stream id 0", "05000100"),
        ("ids backwards", "0501020005010100"),
        ("unknown kind", "7f010100"),
        ("invoke of a server", "0301010178"),
        ("garbage protobuf", "050101030affff"),
    ];
    let (client, server) = pair(1 << 16);
    for (what, text) in hostile {
        let rpc = TailnetClient::new(client.clone());
        let mut maps = rpc.stream_derp_maps().await.unwrap();
        let mut stream = server.accept().await.unwrap();
        stream.write_all(&hex(text)).await.unwrap();
        let result = timeout(Duration::from_secs(1), async {
            match maps.next().await {
                Ok(Some(_)) => maps.next().await,
                other => other,
            }
        });
        assert!(result.await.expect(what).is_err(), "{what}");
    }
    let mut maps = TailnetClient::new(client).stream_derp_maps().await.unwrap();
    let mut stream = server.accept().await.unwrap();
    // An unknown kind with the control flag, a packet of another stream id, metadata of a server: ignored.
    stream.write_all(&hex("ff010100 05010200")).await.unwrap();
    assert!(maps.next().await.unwrap().is_some());
}

/// Echoes requests; other names show the ways a call can end.
struct Echo;

impl Service for Echo {
    async fn call(self: Arc<Self>, mut call: ServerCall) -> Result<(), CallError> {
        match call.rpc.as_str() {
            "/echo" => {
                while let Some(message) = call.requests.next::<pb::Agent>().await? {
                    call.replies.send(&message).await.map_err(|error| CallError::new(error.to_string()))?;
                }
                Ok(())
            }
            "/close" => {
                call.request::<pb::Agent>().await?;
                call.replies.close().await.map_err(|error| CallError::new(error.to_string()))
            }
            "/wait" => {
                call.closed().await;
                Ok(())
            }
            other => Err(CallError::unknown_rpc(other)),
        }
    }
}

fn agent(name: &str) -> pb::Agent {
    pb::Agent { name: name.into(), ..Default::default() }
}

#[tokio::test(start_paused = true)]
async fn both_halves_against_each_other() {
    for pipe in [1, 1 << 16] {
        let (session, server) = pair(pipe);
        let serving = tokio::spawn(serve(server, Arc::new(Echo)));
        let client = Client::new(session.clone());
        let one: pb::Agent = client.unary("/echo", &agent("one")).await.unwrap();
        assert_eq!(one.name, "one");
        let error = client.unary::<_, pb::Agent>("/nothing", &agent("x")).await.unwrap_err();
        assert!(error.is_unimplemented(), "{error}");
        assert_eq!(client.unary::<_, pb::Agent>("/close", &agent("x")).await, Err(RpcError::Ended));

        // DR-7: a message of more than one frame and more than one window.
        let (mut writer, mut reader) = client.open::<pb::Agent, pb::Agent>("/echo").unwrap();
        let size = if pipe == 1 { 70_000 } else { 700_000 };
        let big = agent(&"y".repeat(size));
        let (sent, got) = tokio::join!(writer.send(&big), reader.next());
        sent.unwrap();
        assert_eq!(got.unwrap().unwrap().name.len(), size);
        writer.close().await.unwrap();

        let (mut waiting, nothing) = client.open::<pb::Agent, pb::Agent>("/wait").unwrap();
        waiting.flush().await.unwrap();
        waiting.close().await.unwrap();
        drop((reader, writer, waiting, nothing));
        timeout(Duration::from_secs(20), async {
            while session.stream_count() > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .expect("streams of ended calls are forgotten on both sides");
        session.close();
        serving.await.unwrap();
    }
}

/// DR-2: several calls one after the other on one stream; DR-17: metadata before an Invoke; 9.10.
#[tokio::test(start_paused = true)]
async fn several_calls_share_a_stream() {
    let (session, server) = pair(1 << 16);
    tokio::spawn(serve(server, Arc::new(Echo)));
    let mut stream = session.open().unwrap();
    let mut output = hex("0f01010a0a080a016b120376616c");
    // Metadata was packet 1 of stream 1.
    output.extend(hex("03010205 2f6563686f 050103030a0161 0d010400"));
    let mut second = PacketWriter::new(2);
    second.invoke("/echo", &mut output);
    second.message(&hex("0a0162"), &mut output);
    second.close_send(&mut output);
    for byte in &output {
        stream.write_all(&[*byte]).await.unwrap();
    }
    let mut reader = PacketReader::new();
    let mut got: Vec<Packet> = Vec::new();
    while got.last().is_none_or(|packet| (packet.stream, packet.kind) != (2, Kind::CloseSend)) {
        let chunk = bytes(&mut stream, 1).await;
        got.extend(reader.read(&mut chunk.as_slice()).unwrap());
    }
    let last: Vec<_> =
        got.iter().filter(|packet| packet.stream == 2).map(|packet| (packet.kind, packet.data.clone())).collect();
    assert_eq!(last, [(Kind::Message, hex("0a0162")), (Kind::CloseSend, vec![])]);
}

/// DR-15: the end of the stream alone cancels a call.
#[tokio::test(start_paused = true)]
async fn a_vanished_client_ends_its_call() {
    let (session, server) = pair(1 << 16);
    let stream = tokio::spawn({
        let server = server.clone();
        async move { server.accept().await.unwrap() }
    });
    let (mut writer, reader) = Client::new(session).open::<pb::Agent, pb::Agent>("/wait").unwrap();
    writer.flush().await.unwrap();
    let serving = tokio::spawn(super::serve_stream(stream.await.unwrap(), Arc::new(Echo)));
    drop((writer, reader));
    timeout(Duration::from_secs(1), serving).await.unwrap().unwrap();
}

/// TR-38: what came before the end is delivered before the end.
#[tokio::test(start_paused = true)]
async fn tr_38_messages_precede_close_and_error() {
    for end in ["0b010400", "07010408000000000000000c"] {
        let (client, server) = pair(1 << 16);
        let mut maps = TailnetClient::new(client).stream_derp_maps().await.unwrap();
        let mut stream = server.accept().await.unwrap();
        stream.write_all(&hex(&format!("05010100 05010200 05010300 {end}"))).await.unwrap();
        for _ in 0..3 {
            assert!(maps.next().await.unwrap().is_some());
        }
        assert_eq!(maps.next().await.is_ok(), end.starts_with("0b"));
        assert_eq!(maps.next().await, Ok(None));
    }
}

#[test]
fn names_match_the_specification() {
    assert_eq!(calls::COORDINATE, "/coder.tailnet.v2.Tailnet/Coordinate");
    assert_eq!(calls::WORKSPACE_UPDATES, "/coder.tailnet.v2.Tailnet/WorkspaceUpdates");
}
