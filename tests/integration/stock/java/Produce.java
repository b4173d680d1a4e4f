import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.Future;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Sends each file as one record, keyed by its name, with the Java client as it comes.
 * usage: Produce BOOTSTRAP TOPIC CODEC FILE...   CODEC "default" leaves the client's own choice.
 */
class Produce {
    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        if (!args[2].equals("default")) {
            settings.put("compression.type", args[2]);
        }
        try (var producer = new KafkaProducer<>(settings, new StringSerializer(), new ByteArraySerializer())) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (int i = 3; i < args.length; i++) {
                Path file = Path.of(args[i]);
                String key = file.getFileName().toString().replaceFirst("\\..*", "");
                sent.add(producer.send(new ProducerRecord<>(args[1], key, Files.readAllBytes(file))));
            }
            for (Future<RecordMetadata> one : sent) {
                one.get();
            }
        }
    }
}
